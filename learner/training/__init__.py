"""Training on one batch: preparation, optimizer steps, measurements, guards."""
