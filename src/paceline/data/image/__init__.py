"""Image data sets: open, check and decode files, augment and batch them."""
