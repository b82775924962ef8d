"""Studies of many runs: learning rate, batch size, gradient noise, hyper-parameter search."""
