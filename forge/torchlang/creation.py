"""Creation functions of torch."""
