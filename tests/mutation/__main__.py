"""Try machine-made mutants: `python -m tests.mutation --sample 600`, three hours of two cores."""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import threading
import time
from pathlib import Path

from configs.worker import Worker

from .mutant import Mutant
from .report import summary, survivors
from .targets import Target, all_mutants
from .trial import Trial, workplace


def main() -> int:
    """Try a seeded sample, or all; prints the survivors, then one JSON object."""
    options = _options()
    mutants = [x for x in all_mutants() if options.only in x[0].file]
    chosen = list(mutants)
    random.Random(options.seed).shuffle(chosen)
    if not options.full:
        chosen = chosen[: options.sample]
    if options.list:
        for mutant, _ in mutants:
            source = Path(mutant.file).read_text()
            print(f"{mutant.file}:{mutant.number(source)} [{mutant.kind}]", end="  ")
            print(f"{mutant.old_line(source)}  ->  {mutant.new_line(source)}")
        print(len(mutants))
        return 0
    trials = _try_all(chosen, jobs=options.jobs, until=time.monotonic() + 60 * options.minutes)
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
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    return parser.parse_args()


def _try_all(chosen: list[tuple[Mutant, Target]], *, jobs: int, until: float) -> list[Trial]:
    left: queue.SimpleQueue[tuple[Mutant, Target]] = queue.SimpleQueue()
    for one in chosen:
        left.put(one)
    trials: list[Trial] = []
    lock = threading.Lock()

    def work() -> None:
        with workplace() as place:
            while time.monotonic() < until:
                try:
                    mutant, target = left.get_nowait()
                except queue.Empty:
                    return
                trial = place.try_mutant(mutant, target)
                with lock:
                    trials.append(trial)
                    _show(trial, len(trials), len(chosen))

    workers = [Worker(work, name=f"mutants-{i}").start() for i in range(jobs)]
    for worker in workers:
        worker.join()
    return trials


def _show(trial: Trial, done: int, of: int) -> None:
    line = (survivors([trial]) or [trial.outcome])[0]
    print(f"{done}/{of}  {trial.took_s:.0f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
