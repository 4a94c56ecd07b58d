"""Episodes from lease to submission.

environment_workers  Calls of environments off the actor's event loop, for many episodes side by
                     side
heartbeat            Heartbeats: every lease is kept alive, and tokens of unfinished episodes are
                     stored
held_leases          Leases of one actor, from grant to acknowledged record, and the gate that holds
                     swaps back
interfaces           Interfaces of the broker's client and the weight receiver, as the episode loop
                     uses them
maker                From a lease to a rollout, and from a finished rollout to an episode
outbox               Finished episodes and failures on their way to the broker, kept until it
                     acknowledges them
play                 Episodes outside of a run's episode loop: along a script, by an echo, or by a
                     model
rollout              One episode in the making: a state machine without I/O
sampling             Sampling: leased episodes into the engine, and its tokens out until a turn ends
scoring              Scoring of ended turns and of complete episodes, up to the record in the outbox
"""
