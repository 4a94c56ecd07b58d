"""Checks between settings of different tables.

algorithm  Rules of the mathematics; each check returns an error text, or None
learner    Rules between settings of the learner; each check returns an error text, or None
store      Memory that a run needs in Redis, and rules of replay; each check returns a text, or None
tables     Rules between tables of settings; each check returns an error text, or None
"""
