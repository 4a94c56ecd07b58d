"""Second copy of the weights of vLLM's model on a CPU, and how it is filled.

live    Reading back of the model that a worker of vLLM computes with, where there is no shadow copy
model   Second copy of vLLM's model on a CPU: filled beside the running steps, exchanged between two
plan    Plan of a fill: which part of which parameter each tensor of a version becomes
stored  Contents of a model's storage, compared with the version that they should be
"""
