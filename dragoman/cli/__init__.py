"""The command line: one module per command, which parses options, calls the library and prints."""
