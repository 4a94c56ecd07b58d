"""CURVE keys, authentication and ZeroMQ sockets."""
