"""The client of one Redis server: address, identity, connection, scripts, errors."""
