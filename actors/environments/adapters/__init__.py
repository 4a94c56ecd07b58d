"""Environments written for other projects, taken as they are.

forms            The form of an environment, by the methods of what was made
games            Text environments of other projects behind one interface
row_environment  Rows of a dataset, each of them a question to a class written for TRL or for
                 skyrl-gym
tools            Episodes with tools: a class whose public methods the policy may call
"""
