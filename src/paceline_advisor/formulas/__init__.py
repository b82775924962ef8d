"""Rules of thumb as functions: plain arithmetic on plain numbers, each with its source."""
