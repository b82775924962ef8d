"""Slices over image folders."""

from __future__ import annotations

from backend_slices import same, shuffled, slices

__all__ = ["same", "shuffled", "slices"]
