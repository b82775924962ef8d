"""Data sets of text: each file registers its data sets."""
