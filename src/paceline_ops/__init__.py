"""What surrounds runs: serving, job launchers, watching, other trainers' recipes, DALI, logs for MLPerf."""
