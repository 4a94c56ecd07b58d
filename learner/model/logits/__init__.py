"""Logits of tokens, a chunk at a time: log-probs, entropies and their gradients."""
