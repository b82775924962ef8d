"""Open trained weights, predict with them, and export them."""
