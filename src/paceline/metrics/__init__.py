"""Metrics of an evaluation, exact for any number of processes."""
