"""Tools around a run: estimate its cost, find bottlenecks, choose settings, and check correctness."""
