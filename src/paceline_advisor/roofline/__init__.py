"""Rooflines: the least time that a device needs for each layer."""
