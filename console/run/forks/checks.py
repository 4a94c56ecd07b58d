"""The checks of a start, in a fork that has imported what they need.

Run as `python -m console.run.forks.checks`: settings and URL of the store come in as JSON, and what
is found goes out as JSON. A model that `init` stands for needs no library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from configs.errors import NyalaError, SettingsError
from configs.settings import Settings
from console.run.placement import environment_of
from console.run.preflight import (
    checks_of_doubt,
    checks_of_start,
    doubts_about,
    refuse_what_cannot_run,
)
from console.run.process import PYTHON, Command, Forks

from .fork_server import CHECKS

PR_SET_PDEATHSIG = 1


def check_start(settings: Settings, *, redis_url: str | None, forks: Forks | None) -> list[str]:
    """Do all checks of a start, and return what is doubtful.

    Raises:
        SettingsError: The run cannot start, or a check in a fork stands still.
    """
    found = None
    if forks is not None and settings.run.model != "init":
        found = _found_in_fork(settings, redis_url, forks)
    if found is None:
        found = _found(settings, redis_url)
    if "refusal" in found:
        raise SettingsError(found["refusal"])
    return list(found["doubts"])


def _found(settings: Settings, redis_url: str | None) -> dict[str, Any]:
    try:
        refuse_what_cannot_run(settings, redis_url=redis_url)
    except NyalaError as refusal:
        return {"refusal": str(refusal)}
    return {"doubts": doubts_about(settings, redis_url=redis_url)}


def _found_in_fork(
    settings: Settings, redis_url: str | None, forks: Forks
) -> dict[str, Any] | None:
    """Return what a fork has found; None if there was none, or it failed."""
    environment = environment_of("learner", settings)
    command = Command("checks", "checks", (*PYTHON, CHECKS), Path(os.devnull), environment)
    forks.wait(command)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
        request = {"settings": settings.model_dump(mode="json"), "redis_url": redis_url}
        given.write(json.dumps(request).encode())
        given.seek(0)
        with os.fdopen(2, "wb", closefd=False) as err:
            child = forks.start(command, out, err, given)
        if child is None:
            return None
        limit_s = _limit_s(settings, redis_url)
        try:
            code = child.wait(limit_s)
        except TimeoutError:
            raise SettingsError(
                f"the checks of a start must end within {limit_s:.0f} s, got no end; `nyala "
                f"doctor` with the same settings does them one by one, and names the one that "
                f"stands still"
            ) from None
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        return dict(json.load(out)) if code == 0 else None


def _limit_s(settings: Settings, redis_url: str | None) -> float:
    """Return the time of all checks together."""
    checks = (checks_of_start(settings, redis_url), checks_of_doubt(settings, redis_url))
    return sum(check.limit_s for each in checks for check in each)


def main() -> None:
    """Read the settings, and write what is found; end with the process that asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # an environment or a reward may print
        settings = Settings.model_validate(request["settings"])
        json.dump(_found(settings, request["redis_url"]), out)


if __name__ == "__main__":
    main()
