"""Checks of the weights that an engine serves.

probe      Judgement of the probe: whether engine and learner compute the same policy. Pure
read_back  Reading back of what an engine has stored: after so many swaps that it costs next to
           nothing
"""
