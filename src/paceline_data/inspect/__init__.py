"""Check an image set before a run: damage, duplicates, leaks, class balance."""
