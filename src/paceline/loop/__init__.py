"""Your own training loop, with the order, checkpoints, ledger and records of a run."""
