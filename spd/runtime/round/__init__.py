"""What runs on the device: the round, its state, windows, caches, sampler and graphs."""
