"""A copy of a policy version in a file, for people and their tools."""
