"""The doctor: find what slows or breaks a recipe, and measure what each change gains."""
