"""Random histories in which every reply, and all that the store holds, is compared with the model.

Nothing here plays fair: any fence, offset, batch and lineage may be sent, the clock jumps, the
store loses its last writes, and what is rare in a run is as frequent as the rest. To see a seed
again:

    python -m tests.buffer.support.model.history --seed 37
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from buffer.client.scripts import load_script
from tests.buffer.support.model.both import LIMITS, Mismatch, Modelled
from tests.buffer.support.model.moves import MOVES
from tests.buffer.support.model.store_moves import resume
from tests.buffer.support.model.stores import InMemory, Playground

STEPS = 300
COMPARE_EVERY = 4
IS_RESUMED = 0.2
"""After each step that finds the run ended, or recovering."""


@contextmanager
def small_bounds() -> Iterator[None]:
    """Chunks are joined and calls are sliced after a few."""
    with (
        mock.patch.multiple("buffer.operations.leases", MAX_CHUNKS=LIMITS.max_chunks),
        mock.patch.multiple(
            "buffer.operations.conversations",
            MAX_CALLS=LIMITS.max_calls,
            MAX_OPEN_CALLS=LIMITS.max_open_calls,
        ),
        mock.patch.multiple("buffer.operations.batches", SLICE=4, UNITS_PER_DROP=1),
        mock.patch.multiple("buffer.operations.tasks", SLICE=7),
    ):
        yield


def play(store: Playground, seed: int, *, steps: int = STEPS) -> Modelled:
    """Play one history; raises Mismatch where the store does not do what the model says."""
    history = Modelled(store, seed)
    names, weights = list(MOVES), list(MOVES.values())
    with small_bounds():
        for step in range(steps):
            (move,) = history.rng.choices(names, weights)
            move(history)
            if history.model.state != "RUNNING" and history.rng.random() < IS_RESUMED:
                resume(history)
            if step % COMPARE_EVERY == 0:
                history.compare()
        history.compare()
    return history


def main() -> int:
    """Play the seeds of the command line in memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=1, help="how many, one after the other")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            play(InMemory(load_script), seed)
        except Mismatch as error:
            failed += 1
            print(f"seed {seed}: {error}", flush=True)
    print(f"{options.count} histories, {failed} differ from the model")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
