"""Everything that crosses a process boundary: messages, sockets, keys, and the stateless server."""
