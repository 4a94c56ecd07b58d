"""One batch: preparation, optimizer steps, measurements, guards."""
