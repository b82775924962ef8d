"""The HTTP service of `paceline serve`."""
