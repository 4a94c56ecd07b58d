"""Environments in a process and a Python of their own.

environment  An environment whose episodes are played in its host; rows of a dataset stay with the
             actor
process      One process of an environment host, and the calls that wait for it
program      Program of an environment host: a class of the user, in a Python of its own
serving      Requests to an environment host, and the episodes that it has under way
"""
