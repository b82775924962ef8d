"""Recommendation: learn from clicks."""
