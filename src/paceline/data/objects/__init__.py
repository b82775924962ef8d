"""Data of your own, as objects: what `paceline.fit` and `paceline.Loop` read."""
