"""Charts as SVG paths: curves over batches, distributions, lives of actors."""
