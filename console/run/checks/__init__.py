"""Checks of settings and machine before a run starts, one file for each thing that is checked.

check    A check of settings or machine, by name, and how a doubt about a run is told from a fault
loss     Checks of what the user brings to the loss: functions, and teachers
machine  Checks of addresses, devices, keys and trackers before a run starts
model    Checks of a run's model and learning rate, and of the engine, memory and disk that it needs
reward   Checks of environments and rewards on one item of each, and of the lengths of prompts
store    Checks of the Redis of a run: that it answers, and that it keeps what it is given
"""
