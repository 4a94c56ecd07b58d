"""Tensors of a checkpoint: names, copies in host memory, files, random number generators."""
