"""Views of a run: progress, tables, plots."""
