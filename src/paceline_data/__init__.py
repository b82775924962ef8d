"""What is done to data before a run: check it, and pack it into files that load fast."""
