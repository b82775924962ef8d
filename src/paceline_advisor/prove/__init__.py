"""Prove that a recipe trains as it specifies, by comparison with a reference without the trainer."""
