"""Samples in many files (shards): their formats, and an index of how many samples each file has."""
