"""Checks of `nyala up` before it starts anything: each raises one sentence, or passes.

Owns the lists of checks, which `nyala doctor` goes through as well; each asks the room concerned.
Nothing is changed here: no folder, no key in Redis, no process that stays.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.child import die_with_parent
from configs.errors import NyalaError, SettingsError
from configs.hashes import is_hosted
from configs.machine import visible_gpus
from configs.settings import RunSettings, Settings

from .checks.check import Check, Doubt
from .checks.machine import check_addresses, check_devices, check_keys, check_trackers
from .checks.model import (
    check_disk,
    check_engine,
    check_lengths,
    check_memory,
    check_model,
    check_parallel,
    check_rate,
    check_shared_memory,
    check_size,
    check_template,
    small_engine_warning,
)
from .checks.reward import (
    REWARD_TIMEOUT_S,
    check_prompts,
    check_reward,
    check_stop,
    parts_warning,
)
from .checks.store import GROUP, REACHED, check_redis, store_checks
from .fork_server import CHECKS
from .plan import environment_of, shared_card_warning
from .process import PYTHON, Command, ForkedChild, Forks, begin_program

INSTALL_S = 600.0
"""Of packages into an environment's own Python."""


def checks_of_start(
    settings: Settings, redis_url: str | None, *, has_begun: bool = False
) -> list[Check]:
    """List the checks without which no run starts.

    Args:
        settings: Of the run.
        redis_url: The server to use; None = one is started.
        has_begun: The run goes on, with the settings that it was begun with.
    """
    run = settings.run
    environments_s = 2 * limit_of_environments(run)
    return [
        Check("network", "addresses", lambda: check_addresses(settings)),
        Check(GROUP, REACHED, lambda: check_redis(run, redis_url)),
        Check("network", "keys", lambda: check_keys(settings.broker)),
        Check("learner", "devices", lambda: check_devices(settings.learner), limit_s=150),
        Check("learner", "ranks", lambda: check_parallel(settings)),
        Check("model", "engine", lambda: check_engine(settings)),
        Check("model", "opens", lambda: check_model(run), limit_s=120),
        Check("model", "context", lambda: check_lengths(settings), "opens", limit_s=60),
        Check("network", "trackers", lambda: check_trackers(settings.trackers, run), limit_s=120),
        Check("data", "reward", lambda: check_reward(settings), limit_s=environments_s),
        Check(
            "data",
            "prompts",
            lambda: check_prompts(settings, has_begun=has_begun),
            "reward",
            limit_s=environments_s,
        ),
    ]


def checks_of_room(settings: Settings) -> list[Check]:
    """List the checks of what a run takes of this machine: memory, shared memory, disk."""
    return [
        Check("room", "size", lambda: check_size(settings)),
        Check("room", "memory", lambda: check_memory(settings), "size"),
        Check("room", "shared memory", lambda: check_shared_memory(settings), "size"),
        Check("room", "disk", lambda: check_disk(settings), "size"),
    ]


def checks_of_doubt(settings: Settings, redis_url: str | None) -> list[Check]:
    """List the checks of what `nyala up` warns of and starts all the same."""
    run, environments_s = settings.run, limit_of_environments(settings.run)
    doubts = [
        Check(
            "data",
            "weights",
            lambda: _doubt(parts_warning(settings), "parts of the reward"),
            "reward",
            limit_s=environments_s,
        ),
        Check(
            "data",
            "stop strings",
            lambda: check_stop(settings),
            "reward",
            limit_s=2 * environments_s,
        ),
        Check(
            "learner",
            "shared card",
            lambda: _doubt(shared_card_warning(settings, visible_gpus()), "none"),
        ),
        Check("model", "learning rate", lambda: check_rate(settings), "opens"),
        Check(
            "model", "small engine", lambda: _doubt(small_engine_warning(settings), "not needed")
        ),
        Check("model", "template", lambda: check_template(run), "opens", limit_s=120),
    ]
    if redis_url is not None:
        doubts += store_checks(run, settings.buffer, redis_url)
    return doubts


def limit_of_environments(run: RunSettings) -> float:
    """Return the seconds in which the environments of a run are tried; some are installed first."""
    return sum(
        REWARD_TIMEOUT_S + (INSTALL_S if is_hosted(alone) else 0.0)
        for alone in run.by_environment.values()
    )


def refuse_what_cannot_run(
    settings: Settings, *, redis_url: str | None, has_begun: bool = False
) -> list[str]:
    """Do all checks of a start, report all that fail, and return what is doubtful.

    Raises:
        SettingsError: At least one check failed.
    """
    return _looked_at(checks_of_start(settings, redis_url, has_begun=has_begun)).doubts_if_free()


def check_room(settings: Settings) -> list[str]:
    """Check that this machine has room for a run, and return what is doubtful.

    Raises:
        SettingsError: It has not.
    """
    return _looked_at(checks_of_room(settings)).doubts_if_free()


class Found(NamedTuple):
    """What checks have found."""

    problems: list[str]
    doubts: list[str]

    def doubts_if_free(self) -> list[str]:
        """Return what is doubtful.

        Raises:
            SettingsError: Something is in the way.
        """
        if self.problems:
            raise SettingsError(_listed(self.problems))
        return self.doubts


def _looked_at(checks: Sequence[Check]) -> Found:
    problems: list[str] = []
    doubts: list[str] = []
    lost: set[tuple[str, str]] = set()
    for check in checks:
        if (check.group, check.needs) in lost:
            lost.add((check.group, check.name))
            continue
        try:
            found = check.look()
        except NyalaError as error:
            problems += [str(error)] if str(error) not in problems else []
            lost.add((check.group, check.name))
        else:
            doubts += [found.text] if isinstance(found, Doubt) else []
    return Found(problems, doubts)


def doubts_about(settings: Settings, *, redis_url: str | None) -> list[str]:
    """Return what is doubtful about settings that can run."""
    texts = []
    for check in checks_of_doubt(settings, redis_url):
        try:
            found = check.look()
        except NyalaError as error:
            texts.append(str(error))
        else:
            texts += [found.text] if isinstance(found, Doubt) else []
    return texts


def _doubt(text: str | None, otherwise: str) -> str | Doubt:
    return otherwise if text is None else Doubt(text)


def _listed(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} things are in the way; nothing was started:{lines}"


# --------------------------------------------------------------------------------------------------
# The checks of a start, in a process that has imported what they need.
#
# Run as `python -m console.run.preflight`: settings and URL of the store come in as JSON, and what
# is found goes out as JSON. It is a fork of the server that has imported the libraries or, on a
# machine with cores for both, a program that imports beside it: then a start waits for the slower
# of both, and not for one that ends because it may not fork. What needs no library is looked at
# here meanwhile. A model that `init` stands for needs none.

HERE = {"addresses", REACHED, "keys", "devices", "engine"}
"""Checks of this process, while the other imports."""


def check_start(
    settings: Settings, *, redis_url: str | None, forks: Forks | None, has_begun: bool = False
) -> list[str]:
    """Do all checks of a start, and return what is doubtful.

    Args:
        settings: Of the run.
        redis_url: The server to use; None = one is started.
        forks: Makes the fork in which they are done; None = they are done here.
        has_begun: The run goes on, with the settings that it was begun with.

    Raises:
        SettingsError: The run cannot start, or a check in another process stands still.
    """
    found = None
    if forks is not None and settings.run.model != "init":
        found = _found_apart(settings, redis_url, forks, has_begun)
    if found is None:
        found = _found(settings, redis_url, has_begun)
    return found.doubts_if_free()


def _found(
    settings: Settings, redis_url: str | None, has_begun: bool, *, elsewhere: Collection[str] = ()
) -> Found:
    checks = checks_of_start(settings, redis_url, has_begun=has_begun)
    found = _looked_at([check for check in checks if check.name not in elsewhere])
    if found.problems:
        return found
    return Found([], [*found.doubts, *doubts_about(settings, redis_url=redis_url)])


def _found_apart(
    settings: Settings, redis_url: str | None, forks: Forks, has_begun: bool
) -> Found | None:
    """Return what another process and this one have found; None if there was no other."""
    environment = environment_of("learner", settings)
    command = Command("checks", "checks", (*PYTHON, CHECKS), Path(os.devnull), environment)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
        request = {
            "settings": settings.model_dump(mode="json"),
            "redis_url": redis_url,
            "has_begun": has_begun,
        }
        given.write(json.dumps(request).encode())
        given.seek(0)
        with os.fdopen(2, "wb", closefd=False) as err:
            child = begin_program(command, out, err, given) if forks.has_room else None
            try:
                checks = checks_of_start(settings, redis_url, has_begun=has_begun)
                here = _looked_at([check for check in checks if check.name in HERE])
                if child is None:
                    forks.wait(command)
                    child = forks.start(command, out, err, given)
                if child is None:
                    return None
                code = _end_of(child, _limit_s(settings, redis_url))
            finally:
                if child is not None:
                    child.kill()
                    child.wait()
        out.seek(0)
        if code:
            return None
        there = Found(**json.load(out))
    new = [each for each in there.problems if each not in here.problems]
    return Found([*here.problems, *new], [*here.doubts, *there.doubts])


def _end_of(child: ForkedChild, limit_s: float) -> int:
    try:
        return child.wait(limit_s)
    except TimeoutError:
        raise SettingsError(
            f"the checks of a start must end within {limit_s:.0f} s, got no end; `nyala "
            f"doctor` with the same settings does them one by one, and names the one that "
            f"stands still"
        ) from None


def _limit_s(settings: Settings, redis_url: str | None) -> float:
    """Return the time of all checks together."""
    checks = (checks_of_start(settings, redis_url), checks_of_doubt(settings, redis_url))
    return sum(check.limit_s for each in checks for check in each)


def main() -> None:
    """Read the settings, and write what is found; end with the process that asked."""
    die_with_parent()
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # an environment or a reward may print
        settings = Settings.model_validate(request["settings"])
        found = _found(settings, request["redis_url"], request["has_begun"], elsewhere=HERE)
        json.dump(found._asdict(), out)


if __name__ == "__main__":
    main()
