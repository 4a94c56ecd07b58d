"""Try machine-made mutants: `python -m tests.mutation --sample 600`, two hours of two cores."""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import sys
import threading
import time
from pathlib import Path

from configs.worker import Worker

from .mutant import Mutant
from .report import summary, survivors
from .results import Key, Results, by_key, in_random_order
from .targets import ROOT, Target, all_mutants
from .trial import Trial, copied_checkout


def main() -> int:
    """Try a seeded sample, or all; prints the survivors, then one JSON object."""
    options = _options()
    mutants = by_key(x for x in all_mutants() if options.only in x[0].file)
    if options.list:
        for key, (mutant, _) in mutants.items():
            number = mutant.number((ROOT / key.file).read_text())
            print(f"{key.file}:{number} [{mutant.kind}]  {key.old_line}  ->  {key.new_line}")
        print(len(mutants))
        return 0
    chosen = in_random_order(mutants, options.seed)
    if not options.full:
        chosen = chosen[: options.sample]
    results = Results(options.done)
    left = [key for key in chosen if key not in results]
    until = time.monotonic() + 60 * options.minutes
    _try_all({key: mutants[key] for key in left}, results, jobs=options.jobs, until=until)
    trials = [results.trial(key, mutants[key][0]) for key in chosen if key in results]
    print("\n".join(survivors(trials)))
    print(json.dumps(summary(trials, of=len(mutants)) | {"seed": options.seed}))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--sample", type=int, default=600, help="mutants to try (default: 600)")
    parser.add_argument("--full", action="store_true", help="try all of them: days")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after these")
    parser.add_argument("--only", default="", help="part of the path of the files to change")
    parser.add_argument(
        "--done", type=Path, help="JSON lines of results: those in it count, others are added"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    return parser.parse_args()


def _try_all(
    chosen: dict[Key, tuple[Mutant, Target]], results: Results, *, jobs: int, until: float
) -> None:
    left: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in chosen:
        left.put(key)
    done = itertools.count(1)
    lock = threading.Lock()

    def work() -> None:
        with copied_checkout() as place:
            while time.monotonic() < until:
                try:
                    key = left.get_nowait()
                except queue.Empty:
                    return
                trial = place.try_mutant(*chosen[key])
                with lock:
                    results.add(key, trial)
                    _show(trial, next(done), len(chosen))

    workers = [Worker(work, name=f"mutants-{i}").start() for i in range(jobs)]
    for worker in workers:
        worker.join()


def _show(trial: Trial, done: int, of: int) -> None:
    line = (survivors([trial]) or [trial.outcome])[0]
    print(f"{done}/{of}  {trial.took_s:.0f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
