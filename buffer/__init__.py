"""The replay buffer: the episode record and the Redis store with its leases."""
