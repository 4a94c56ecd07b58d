"""The mathematics of a step: advantages, corrections, surrogates, aggregations. Tensors only."""
