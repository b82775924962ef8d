"""How results are shown: HTML pages that load nothing from elsewhere, their charts and tables."""
