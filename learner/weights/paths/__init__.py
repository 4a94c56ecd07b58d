"""Paths of a version to its actors: from whom each of them pulls it."""
