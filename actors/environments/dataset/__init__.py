"""The environment `dataset`: questions and answers out of a file."""
