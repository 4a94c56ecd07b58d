"""Checks of settings against each other, run whenever a `Settings` is made.

A private check returns an error text, or None where nothing is wrong.

algorithm  Rules of algorithm, critic, reference KL and teacher
learner    Rules of the learner, of `run.deterministic`, and of `parallel` against ranks and model
store      Bytes that a run needs in Redis and in messages, and rules of replay
tables     All rules of settings together; those between tables, of the fleet and of addresses
"""
