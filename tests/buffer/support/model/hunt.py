"""Random histories alone against each planted bug.

python -m tests.buffer.support.model.hunt --seeds 50
"""

from __future__ import annotations

import argparse
import sys
import time

import lupa
import redis

from tests.buffer.support.model.both import Mismatch
from tests.buffer.support.model.history import play
from tests.buffer.support.model.planted_bugs import LISTS, Bug
from tests.buffer.support.model.stores import InMemory
from tests.buffer.support.mutants import broken


def find(bug: Bug, seeds: int) -> tuple[int, str] | None:
    """The first seed whose history differs from the model, and how; None if none does."""
    scripts = broken(bug)
    for seed in range(seeds):
        try:
            play(InMemory(scripts), seed)
        except Mismatch as error:
            return seed, str(error)
        except (lupa.LuaError, redis.ResponseError) as error:
            return seed, f"the script failed: {error}"
    return None


def main() -> int:
    """Print a line per bug, and the share that was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="most histories per bug")
    parser.add_argument("--list", choices=LISTS, action="append", help="all by default")
    parser.add_argument("--least", type=float, default=0.9, help="share to find, or fail")
    options = parser.parse_args()
    is_enough = True
    for name in options.list or LISTS:
        found = [_report(bug, options.seeds) for bug in LISTS[name]]
        share = sum(found) / len(found)
        is_enough = is_enough and share >= options.least
        print(
            f"{name}: {sum(found)} of {len(found)} found within {options.seeds} seeds", flush=True
        )
    return 0 if is_enough else 1


def _report(bug: Bug, seeds: int) -> bool:
    began = time.monotonic()
    found = find(bug, seeds)
    outcome = "NOT FOUND" if found is None else f"seed {found[0]:2}: {found[1]:.110}"
    took_s = time.monotonic() - began
    print(f"{bug.file:20} {bug.new or bug.old:.46} | {took_s:5.1f} s | {outcome}", flush=True)
    return found is not None


if __name__ == "__main__":
    sys.exit(main())
