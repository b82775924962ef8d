"""A folder to share: a model with its labels, a card, a page, and a program that runs without Paceline."""
