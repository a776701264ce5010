"""What the commands do, by the modules and the names that declare them. Only a command that runs imports these."""
