"""Around a run: what it will take, what holds it back, which setting is best, and whether it is right."""
