"""A run under random faults and a lying actor for as long as asked: what breaks, and what grows.

endurance    An endurance run: random faults, one after the other, beside an actor that lies all the
             time
growth       Growth of the processes of a run: samples of /proc, and their slopes by role
lies         Lies of an actor with a key: whatever the protocol lets it send, about any task
lying_actor  An actor with a key of the run that lies: `python -m lab.endurance.lying_actor ...`
"""
