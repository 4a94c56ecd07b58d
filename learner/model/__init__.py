"""The policy: a causal language model, sharded over ranks."""
