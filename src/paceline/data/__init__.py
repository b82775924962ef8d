"""The order of samples, random draws, and batches for each rank, for any number of ranks."""
