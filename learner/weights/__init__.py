"""Publication of weights, beside training."""
