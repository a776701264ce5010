"""The torch executor's implementations of the embedding family."""
