"""Predict throughput, time and cost on more devices."""
