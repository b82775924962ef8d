"""Measurements of a run: step times, memory, profiles; and where they go: display and trackers."""
