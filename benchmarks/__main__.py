"""The short form of every benchmark, one after the other: `python -m benchmarks [NAME ...]`.

Its figures are worth nothing: each form is as small as it can be, so that all of its code has run.
One that ends with an error, takes longer than five minutes, or does not print an object with
`arms`, `ratios` and `machine` last is named, with the end of what it wrote; the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from benchmarks.support.workload import environment

LIMIT_S = 300.0  # on busy cores; on quiet ones most take a minute
ERROR_LINES = 30
SHORT_FORMS = {
    "agents": "agents",
    "batch_size": "batch_size --blocks 64",
    "card": "card --only machine --only learner --device cpu --tiny",
    "delivery": "delivery --only nyala --only raw_zeromq --only streams_ack",
    "delivery_fleet": "delivery --only fleet --actors 100",
    "environments": "environments",
    "learner_small": "learner --only small",
    "learner_save": "learner --only save",
    "learner_step": "learner --only output_layer --only activations --only lockstep",
    "replay": "replay --most 10000",
    "ring": "ring",
    "ring_short": "ring --only short",
    "ring_start": "ring --only start",
    "ring_watching": "ring --only watching",
    "ring_tracing": "ring --only tracing",
    "same_again": "same_again --batches 3",
    "scale": "scale --short",
    "sites": "sites --steps 2 --turns 1 --full-steps 1",
    "staleness": "staleness --method naive --lag 0 --seeds 1",
    "weights_broadcast": "weights --only broadcast --only held",
    "weights_pause": "weights --only pause",
    "weights_fill": "weights --only fill",
    "weights_sparse": "weights --only sparse",
    "weights_fan_out": "weights --only fan_out --only peers",
}


def main() -> int:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help=f"of {', '.join(SHORT_FORMS)}")
    names = parser.parse_args().name or list(SHORT_FORMS)
    if unknown := set(names) - SHORT_FORMS.keys():
        parser.error(f"NAME must be of {', '.join(SHORT_FORMS)}, got {', '.join(sorted(unknown))}")
    failed = [name for name in names if not _passes(name)]
    print(f"{len(names) - len(failed)} of {len(names)} short forms end as they should", end="")
    print(f"; these do not: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


def _passes(name: str) -> bool:
    began = time.monotonic()
    module, *flags = SHORT_FORMS[name].split()
    command = [sys.executable, "-m", f"benchmarks.{module}", *flags]
    try:
        done = subprocess.run(
            command, capture_output=True, env=environment(), text=True, timeout=LIMIT_S, check=False
        )
        fault = f"exit code {done.returncode}" if done.returncode else _fault_of(done.stdout)
        errors = done.stderr
    except subprocess.TimeoutExpired as late:
        fault, errors = f"took longer than {LIMIT_S:g} s", (late.stderr or b"").decode()
    print(f"{time.monotonic() - began:5.0f} s  {name}: {fault or 'ok'}", flush=True)
    if fault:
        print(*errors.splitlines()[-ERROR_LINES:], sep="\n", flush=True)
    return not fault


def _fault_of(output: str) -> str | None:
    """Say what the last line lacks; None where it is an object as every benchmark prints."""
    try:
        figures = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return "the last line must be a JSON object"
    missing = {"arms", "ratios", "machine"} - set(figures)
    return f"the JSON object lacks {', '.join(sorted(missing))}" if missing else None


if __name__ == "__main__":
    sys.exit(main())
