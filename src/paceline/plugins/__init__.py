"""Names that stand for code: what is registered, by this package and installed ones, and how it is imported."""
