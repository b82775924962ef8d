"""Text and files of others, read within limits: JSON, YAML, durations, sizes and the names of files."""
