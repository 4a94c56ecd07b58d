"""A run under random faults and a lying actor for a given time, to see failures and growth.

endurance    An endurance run: random faults, one after the other, beside a lying actor
growth       Growth of the processes of a run, from samples of /proc, and what they leave in
             /dev/shm
lies         Lies of an actor with a key: any message that the protocol allows, about any task
lying_actor  An actor with a key of the run that lies: `python -m lab.endurance.lying_actor ...`
"""
