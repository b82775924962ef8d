"""Several processes: start them, find the others, reduce gradients, vote, shard, and detect hung ranks."""
