"""A training loop of one's own, with the order, checkpoints, ledger and records of a run."""
