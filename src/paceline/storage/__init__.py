"""Object stores and model hubs: addresses, downloads, and a cache."""
