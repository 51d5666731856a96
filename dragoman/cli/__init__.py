"""The command line: one file a command, each of which parses, calls the library and shows."""
