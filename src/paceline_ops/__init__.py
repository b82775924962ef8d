"""What surrounds runs in operation: serving, job launchers, other trainers' recipes, DALI, logs for MLPerf."""
