"""Inference engines behind one protocol: vLLM, and a small one in torch."""
