"""Weight versions: received, checked, given to the engine, and shared with other actors.

counters       Counters of an actor's weight transfers and swaps
exact          Judgement of a probe that is refused for good: float32 decides which side is wrong
group          Transport through a weight group: join it, receive all bytes or updates, confirm, or
               leave it
held           Versions that this actor serves to peers: one complete, one arriving, and updates to
               them
links          Connections of an actor to the ports of the weight plane: the publisher's, and other
               actors'
memory         The publisher's memory, for actors of the same machine and user: versions used where
               they lie
place          The place in which this actor is a member of weight groups: its own process, or a
               worker's
probe          Judgement of the probe: whether engine and learner compute the same policy. Pure
pull           Pulls as a transport: an adapter, a chain of sparse updates to the version here, or
               all bytes
read_back      Reading back of the weights that an engine has stored, rarely enough to cost almost
               nothing
receiver       The weight receiver: from the announcement of a version to an engine that serves it
saved          Copies of a policy version in a safetensors file, out of a live run too, and their
               digests
share          An actor's own port, at which other actors pull the weights that it has
slices         A pull over ZeroMQ, slice by slice: all bytes of a version, or one sparse update to
               it
sources        Sources of slices in the order of the settings: other actors, the publisher
staging_files  Files in shared memory in which arriving weights are assembled; mapped, and used
               again
transfer       From the announcement of a version to its checked bytes in shared memory: one at a
               time
updates        Versions made from updates to the version here: chains of sparse updates, and
               adapters
worker_line    The actor's end of the line to vLLM's first worker, in which its weight groups are
               joined
"""
