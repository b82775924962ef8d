"""Memory of a run: estimate it for any device, and find the largest micro-batch by trials."""
