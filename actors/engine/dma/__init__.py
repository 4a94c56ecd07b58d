"""Weights that a card copies out of shared memory by itself.

pinned_files  Files of weights that a worker of vLLM keeps mapped, and registered with the CUDA
              driver
"""
