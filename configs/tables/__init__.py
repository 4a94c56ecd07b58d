"""The tables of settings: names, types, defaults, ranges and what each key means."""
