"""Checkpoints: their format, durable writes, verification, and copies in object stores."""
