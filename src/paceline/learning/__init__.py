"""Is a run learning? What is observed of it, and what follows."""
