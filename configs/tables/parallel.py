"""`parallel`: what the learner's ranks divide among themselves."""

from __future__ import annotations

from .base import Positive, Table


class ParallelSettings(Table):
    """Sizes of groups of the learner's ranks; `replicate` x `shard` x `tensor` = all of them."""

    replicate: Positive = 1
    """Copies of the sharded weights. Ranks of different copies exchange gradients alone, so that
    gathering weights can stay within a machine.

    Set it to the number of machines, when gathering weights between them is slow."""
    shard: Positive | None = None
    """Ranks over which each copy is sharded (FSDP2); null = all that `replicate` leaves.

    Rarely needs a change: null fits."""
    sequence: Positive = 1
    """Ranks that share the tokens of each microbatch (Ulysses), for contexts that one card cannot
    hold: each has a part of the tokens, and within attention a part of the heads.

    Raise it when a single episode does not fit on one card."""
    tensor: Positive = 1
    """Ranks that divide every large matrix (tensor parallelism), for models whose gathered layers
    one card cannot hold, or of which a microbatch should take less time.

    Raise it when a gathered layer does not fit on one card."""
