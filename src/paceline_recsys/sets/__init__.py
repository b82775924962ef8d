"""Data sets of clicks: by name, and Criteo's files that some are read from."""
