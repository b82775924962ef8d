"""Logs of runs in MLPerf's format."""
