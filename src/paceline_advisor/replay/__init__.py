"""Compute stretches of a run again: to verify it, to go back to a checkpoint, and to fork a new run from one."""
