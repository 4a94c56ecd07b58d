"""The wire form of a model: order and layout of its tensors, and their bytes."""
