"""Products and memory of a CPU, where torch or the C library leaves them slow."""
