"""`paceline watch`: follow runs in the terminal."""
