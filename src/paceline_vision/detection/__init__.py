"""Detection: find objects in pictures."""
