"""The sweep of torch's operator database through forge.jit: `make sweep` writes docs/reference/coverage.md."""
