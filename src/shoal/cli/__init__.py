"""The command line: parse, configure, call."""
