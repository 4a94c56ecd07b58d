"""Episodes from lease to submission.

agent_chat           Calls of live agents as chats or tokens, and turns of the policy as answers to
                     them
agent_log            Turns in the log of a live agent's tokens, and bodies in the log of its calls
agent_mail           Messages between one actor and the mailboxes of its live agents
agent_places         Places of calls in the log of a live agent: behind an earlier turn wherever
                     that is possible
agent_rollout        One episode of a live agent: its calls become turns of one log of tokens
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
