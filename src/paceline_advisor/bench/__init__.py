"""Measure throughput, latency, energy and time to a target, and compare results."""
