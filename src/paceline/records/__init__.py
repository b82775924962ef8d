"""The files of a run directory: events, ledger, summary; without torch."""
