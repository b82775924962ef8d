"""Rules of thumb as functions: plain arithmetic on plain numbers, each with where it comes from."""
