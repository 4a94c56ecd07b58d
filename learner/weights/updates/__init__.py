"""Updates to versions: what has changed since the one before, and the form in which it travels."""
