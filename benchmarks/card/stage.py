"""A stage: a process of its own with a limit, whose figures are kept as soon as they are there.

One that fails, or runs into its limit, costs what it has not measured yet and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.progress import Say
from benchmarks.support.workload import environment

LOOK_EVERY_S = 0.2
STOP_S = 40.0  # `nyala up` and an engine's core need some of it
ERROR_LINES = 15
PACKAGE = "benchmarks.card"

Figures = dict[str, Any]
Note = Callable[[str, Figures], None]
"""Takes an arm's name and what it gave."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked of all stages."""

    device: str
    is_tiny: bool
    model: Path | None
    """A chat model's folder; None = models of random weights."""
    folder: Path

    @property
    def flags(self) -> list[str]:
        """The same, as a stage takes it."""
        model = ["--model", str(self.model)] if self.model else []
        tiny = ["--tiny"] * self.is_tiny
        return ["--device", self.device, "--folder", str(self.folder), *tiny, *model]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what both the command and its stages are asked."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="only shows that all of it runs")
    parser.add_argument("--model", type=Path, help="a chat model's folder, for engine and ring")
    parser.add_argument("--folder", type=Path, help="keep logs, figures and runs here")


def asked_by(chosen: argparse.Namespace, folder: Path) -> Asked:
    """Read them back."""
    model = chosen.model and chosen.model.resolve()
    return Asked(chosen.device, chosen.tiny, model, folder.resolve())


def main(measure: Callable[[Asked, Note], None]) -> None:
    """Be the process of a stage."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    chosen = parser.parse_args()
    asked = asked_by(chosen, chosen.folder)

    def note(arm: str, figures: Figures) -> None:
        with _figures_of(asked, Path(sys.argv[0]).stem).open("a") as file:
            print(json.dumps({arm: figures}), file=file)

    measure(asked, note)


def run_stage(name: str, asked: Asked, *, limit_s: float, say: Say) -> Figures:
    """Run a stage to its end or its limit; returns its arms, and `fault` if it failed."""
    log = asked.folder / f"{name}.log"
    _figures_of(asked, name).unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{PACKAGE}.{name}", *asked.flags]
    began, arms = time.monotonic(), Figures()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(),
            start_new_session=True,
        )
    try:
        while process.poll() is None and time.monotonic() - began < limit_s:
            time.sleep(LOOK_EVERY_S)
            arms |= _new_arms(name, asked, arms, say)
        fault = f"took longer than {limit_s:g} s" if process.poll() is None else None
    finally:
        _end(process)
    arms |= _new_arms(name, asked, arms, say)
    if fault is None and process.returncode:
        fault = f"exit code {process.returncode}"
    if fault:
        say(f"{name}: {fault}; the end of {log}:")
        print(
            *log.read_text(errors="replace").splitlines()[-ERROR_LINES:], sep="\n", file=sys.stderr
        )
        arms["fault"] = fault
    return arms | {"took_s": round(time.monotonic() - began, 1)}


def _figures_of(asked: Asked, name: str) -> Path:
    return asked.folder / f"{name}.jsonl"


def _new_arms(name: str, asked: Asked, known: Figures, say: Say) -> Figures:
    """Read the arms that are not known yet, and show them."""
    path = _figures_of(asked, name)
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    found: Figures = {}
    for line in whole.splitlines():
        found |= json.loads(line)
    new = {arm: figures for arm, figures in found.items() if arm not in known}
    for arm, figures in new.items():
        say(f"{name} {arm}: " + ", ".join(f"{k} {v}" for k, v in figures.items())[:300])
    return new


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and what it has left behind: a lost engine would keep the card's memory."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
