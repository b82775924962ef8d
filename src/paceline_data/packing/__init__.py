"""Pack images into shards."""
