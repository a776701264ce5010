"""Front ends: how programs are captured, and how compiled ones are called."""
