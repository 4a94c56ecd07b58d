"""Runs from Python: what `import nyala` offers."""
