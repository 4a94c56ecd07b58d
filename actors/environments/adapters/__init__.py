"""Environments written for other projects, taken as they are.

forms            The form of an environment, by the methods of what was made, and what adapts it
games            Text environments of other projects behind one interface: begin with a seed, play a
                 turn
row_environment  Rows of a dataset, each of them a question to a class written for TRL or for
                 skyrl-gym
tools            Episodes with tools: a class whose public methods the policy may call, as TRL takes
                 them
"""
