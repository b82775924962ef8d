"""Recipes: the schema, and how files, presets and overrides become one; without torch."""
