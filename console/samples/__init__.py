"""Sampled texts for a person to read: what a run keeps, and answers of its newest model.

answers      Answers of a model to one prompt, for `nyala try`, with the run's template and stop
             rules
command      `nyala samples`: what a run samples, as text
query        Choice of samples for `nyala samples`: which fit, and the best, the worst or any of
             them
try_command  `nyala try`: a prompt of one's own to the newest model of a run, or to a checkpoint
"""
