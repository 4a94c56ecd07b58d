"""Faults of the matrix, one module per kind, and the tools that make them.

clock_jumps    Jumps of the wall clock for the processes of one run; the machine's own clock is not
               touched
conversations  Faults beside live agents: of their host, of their process, and of an actor that
               answers them
network        Faults of the network between one actor and the broker, made by a proxy or a second
               network
processes      Faults of processes: killed, stopped, drained
proxy          A TCP proxy that delays, blocks, resets or half-closes its connections on demand
stores         Faults of storage: Redis, and the disks under it and under the checkpoints
"""
