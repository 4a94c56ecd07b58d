"""Tables of settings: names, types, defaults, ranges and meanings."""
