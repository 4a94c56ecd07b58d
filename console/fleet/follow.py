"""Slurm jobs of actors, kept at the number that the run wants."""

from __future__ import annotations

import getpass
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.errors import SettingsError
from configs.fleet.wanted import first_wanted
from configs.loader import load
from console.display.progress import RunProgress
from console.run.run_folder import RunFolder, RunState

LOOK_S = 30.0
MOST_AT_ONCE = 32  # jobs: a number that was wrong for a moment costs no more
ASK_S = 60.0  # a controller that is busy answers late
MOST_FAILURES = 20  # in a row, which is ten minutes: a controller that is restarted is back by then


class SlurmFleet:
    """The actors' jobs of one run. Slurm keeps the count; a call looks once, and mends it.

    Args:
        folder: Of the run.
        script: `actor.sh`, as rendered.
        options: Of sbatch, such as `--partition=spot`.
        pause: Between looks, seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        script: Path,
        options: Sequence[str],
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pause = pause
        settings = load(folder.config)
        self._folder, self._script, self._options = folder, script, options
        self._name = f"nyala-actor-{settings.run.name}"
        self._progress = RunProgress(folder, steps=settings.run.steps)
        self._first = first_wanted(settings)

    def follow(self) -> None:
        """Follow until the run has ended; its actors end by themselves then.

        Raises:
            SettingsError: Slurm refuses the first commands, or all for ten minutes.
        """
        failures = MOST_FAILURES
        while self._folder.state is not RunState.FINISHED:
            try:
                self.look()
                failures = 0
            except SettingsError as error:
                failures += 1
                if failures > MOST_FAILURES:
                    raise
                print(error, flush=True)
            self._pause(LOOK_S)

    def look(self) -> None:
        """Start or end as many jobs as are missing or too many, within `MOST_AT_ONCE`."""
        progress = self._progress.look()
        wanted = progress.actors_wanted or self._first.actors
        jobs = self._jobs()
        missing = wanted - len(jobs)
        if not missing:
            return
        why = progress.actors_wanted_why or self._first.reason
        print(f"{why}: {wanted} wanted, {len(jobs)} jobs", flush=True)
        for _ in range(min(missing, MOST_AT_ONCE)):
            _run("sbatch", f"--job-name={self._name}", *self._options, str(self._script))
        if missing < 0:
            _run("scancel", *jobs[: min(-missing, MOST_AT_ONCE)])

    def _jobs(self) -> list[str]:
        """List the jobs that wait or run: those that wait first, then the newest."""
        asked = _run(
            *("squeue", "-h", "-r", f"--name={self._name}", f"--user={getpass.getuser()}"),
            *("--states=PENDING,CONFIGURING,RUNNING", "--sort=T,-i", "-o", "%i"),
        )
        return asked.split()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(
            f"Slurm's {command[0]} must answer, got: {error}; follow on a machine that submits jobs"
        ) from None
    if done.returncode:
        raise SettingsError(
            f"Slurm's {command[0]} must succeed, got: {done.stderr.strip()[:500]}; change what it "
            f"refuses, such as --partition"
        )
    return done.stdout
