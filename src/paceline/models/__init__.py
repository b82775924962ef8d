"""Networks: build them, compile them, average their weights, count their FLOPs."""
