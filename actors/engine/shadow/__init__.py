"""Second copy of the weights of vLLM's model on a CPU, and how it is filled."""
