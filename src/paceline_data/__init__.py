"""What is done to data before a run: check it, and pack it into files that load fast.

A run's own reading of data, from sample order to batches, is `paceline.data`, which this package uses.
"""
