"""Data sets of pictures with boxes or label maps: each file registers its data sets."""
