"""What surrounds runs in operation: serving, job launchers, watching, other trainers' recipes, DALI, logs for MLPerf."""
