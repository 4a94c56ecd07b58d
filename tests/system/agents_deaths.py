"""Live agents outlive every part of a run but themselves: each dies at a random moment.

    python -m tests.system.agents_deaths --seeds 20

In each run an actor, the broker, Redis and the learner are killed with SIGKILL and the connection
of the host of agents is cut, in random order, while agents with OpenAI's client talk. Prints a line
for each seed; the first that does not hold ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.system.support.dying_parts import DyingParts


def main() -> None:
    """Play the seeds one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.agents_deaths")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    chosen = parser.parse_args()
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="deaths-") as folder:
            parts = DyingParts(Path(folder), seed)
            talks = parts.play()
        turns = sum(len(talk.turns) for talk in talks.values())
        took_s = time.monotonic() - began
        print(
            f"seed {seed}: {len(talks)} conversations, {turns} turns, "
            f"{' '.join(parts.deaths)} died, all hold, {took_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
