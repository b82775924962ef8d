"""Predictions: what reads the files to predict, and what is answered and written."""
