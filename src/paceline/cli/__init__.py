"""The commands of a run: parse the command line, call, print."""
