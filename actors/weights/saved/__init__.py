"""A copy of a policy version in a file, for people and their tools.

download  A copy of a live run's current weights, without an engine
file      A policy version as a safetensors file that any tool can read, and the digest of such a
          file
"""
