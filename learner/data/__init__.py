"""Training data: curriculum, evaluation, and the claim of each batch."""
