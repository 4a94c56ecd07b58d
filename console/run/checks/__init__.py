"""Checks of settings and machine before a run starts, one file for each thing that is checked.

check    A check of settings or machine, by name, and how a doubt about a run is told from a fault
machine  Checks of addresses, devices, keys and trackers before a run starts
model    Check the model that a run starts from: files, architecture, tokenizer, chat template
reward   Check environments and rewards on one item of each, in the processes that a run has for
         them
store    Check the Redis of a run: that it answers, and that it keeps what it is given
"""
