"""Tasks: what is learned. The interface, and the image tasks."""
