"""The explorer: one page that shows how a model came to its output, served or as one file."""
