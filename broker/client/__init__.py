"""The client of a broker, as actors and operators use it."""
