"""Checks of `nyala up` before it starts anything: each raises one sentence, or passes.

`nyala doctor` goes through the same lists of checks. A check changes nothing of the run: it leaves
no folder, no key in Redis and no process behind. It may fill caches: files of a hub, packages of an
environment that has a Python of its own.
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
from configs.tables.run import UNIFORM

from .checks.check import Check, CheckWarning
from .checks.loss import check_losses, check_teacher
from .checks.machine import (
    agents_room_warning,
    check_addresses,
    check_agents,
    check_devices,
    check_keys,
    check_trackers,
)
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
    check_sampler,
    check_stop,
    parts_warning,
)
from .checks.store import GROUP, REACHED, check_redis, store_checks
from .fork_server import CHECKS
from .plan import environment_of, shared_card_warning
from .process import PYTHON, Command, ForkedChild, Forks, begin_program

INSTALL_S = 600.0
"""Time to install packages into an environment's own Python."""


def checks_of_start(
    settings: Settings, redis_url: str | None, *, has_begun: bool = False
) -> list[Check]:
    """List the checks without which no run starts.

    Args:
        settings: Settings of the run.
        redis_url: URL of the server to use; None = one is started.
        has_begun: Whether the run goes on, with the settings that it was begun with.
    """
    run = settings.run
    environments_s = 2 * limit_of_environments(run)
    agents = Check("data", "agents", lambda: check_agents(settings.agents), limit_s=INSTALL_S)
    teacher = Check("learner", "teacher", lambda: check_teacher(settings), limit_s=120)
    sampler = Check("data", "sampler", lambda: check_sampler(run), "reward", limit_s=environments_s)
    return [
        Check("network", "addresses", lambda: check_addresses(settings)),
        Check(GROUP, REACHED, lambda: check_redis(run, redis_url)),
        Check("network", "keys", lambda: check_keys(settings.broker)),
        Check("learner", "devices", lambda: check_devices(settings.learner), limit_s=150),
        Check("learner", "ranks", lambda: check_parallel(settings)),
        Check("learner", "loss", lambda: check_losses(settings), limit_s=120),
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
        *([sampler] if run.sampler != UNIFORM else []),
        *([agents] if run.has_agents else []),
        *([teacher] if settings.algorithm.has_teacher else []),
    ]


def checks_of_room(settings: Settings) -> list[Check]:
    """List the checks of the memory, shared memory and disk that a run takes."""
    return [
        Check("room", "size", lambda: check_size(settings)),
        Check("room", "memory", lambda: check_memory(settings), "size"),
        Check("room", "shared memory", lambda: check_shared_memory(settings), "size"),
        Check("room", "disk", lambda: check_disk(settings), "size"),
    ]


def checks_of_doubt(settings: Settings, redis_url: str | None) -> list[Check]:
    """List the checks that only make `nyala up` print a warning."""
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
        Check("data", "room", lambda: _doubt(agents_room_warning(run), "enough, or as set")),
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
    """Return the time limit for trying the environments of a run, s; some are installed first."""
    return sum(
        REWARD_TIMEOUT_S + (INSTALL_S if is_hosted(alone) else 0.0)
        for alone in run.by_environment.values()
    )


def refuse_what_cannot_run(
    settings: Settings, *, redis_url: str | None, has_begun: bool = False
) -> list[str]:
    """Do all checks without which no run starts, and return what is doubtful, a text each.

    Raises:
        SettingsError: At least one check failed; the text has all that did.
    """
    return _run_checks(checks_of_start(settings, redis_url, has_begun=has_begun)).doubts_if_free()


def check_room(settings: Settings) -> list[str]:
    """Check that this machine has room for a run, and return what is doubtful, a text each.

    Raises:
        SettingsError: It has no room.
    """
    return _run_checks(checks_of_room(settings)).doubts_if_free()


class Findings(NamedTuple):
    """Problems and doubts that checks have found."""

    problems: list[str]
    doubts: list[str]

    def doubts_if_free(self) -> list[str]:
        """Return what is doubtful if there is no problem.

        Raises:
            SettingsError: There is a problem.
        """
        if self.problems:
            raise SettingsError(_listed(self.problems))
        return self.doubts


def _run_checks(checks: Sequence[Check]) -> Findings:
    problems: list[str] = []
    doubts: list[str] = []
    lost: set[tuple[str, str]] = set()
    for check in checks:
        if (check.group, check.needs) in lost:
            lost.add((check.group, check.name))
            continue
        try:
            result = check.look()
        except NyalaError as error:
            problems += [str(error)] if str(error) not in problems else []
            lost.add((check.group, check.name))
        else:
            doubts += [result.text] if isinstance(result, CheckWarning) else []
    return Findings(problems, doubts)


def doubts_about(settings: Settings, *, redis_url: str | None) -> list[str]:
    """Return what is doubtful about settings with which a run can start, a text each.

    A check that fails is a doubt, too.
    """
    texts = []
    for check in checks_of_doubt(settings, redis_url):
        try:
            result = check.look()
        except NyalaError as error:
            texts.append(str(error))
        else:
            texts += [result.text] if isinstance(result, CheckWarning) else []
    return texts


def _doubt(text: str | None, otherwise: str) -> str | CheckWarning:
    """Return a warning of a check as its result; without one, `otherwise`."""
    return otherwise if text is None else CheckWarning(text)


def _listed(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} things are in the way; nothing was started:{lines}"


# --------------------------------------------------------------------------------------------------
# The checks of a start, in a process that has imported what they need.
#
# Run as `python -m console.run.preflight`: it reads settings and URL of the store as JSON, and
# writes its findings as JSON. The process is a fork of the server that has imported the libraries.
# On a machine with enough cores it is a new program instead, which imports them at the same time as
# the server: a server that cannot fork then costs the start no time. Checks that need no library
# are done in this process meanwhile. The checks of `run.model: init` need no libraries.

HERE = {"addresses", REACHED, "keys", "devices", "engine"}
"""Checks that this process does while the other one imports."""


def check_start(
    settings: Settings, *, redis_url: str | None, forks: Forks | None, has_begun: bool = False
) -> list[str]:
    """Do all checks of a start, and return what is doubtful, a text each.

    Args:
        settings: Settings of the run.
        redis_url: URL of the server to use; None = one is started.
        forks: Server that forks a process for the checks; None = this process does them.
        has_begun: Whether the run goes on, with the settings that it was begun with.

    Raises:
        SettingsError: The run cannot start, or a check in another process hangs.
    """
    findings = None
    if forks is not None and settings.run.model != "init":
        findings = _findings_of_two(settings, redis_url, forks, has_begun)
    if findings is None:
        findings = _findings(settings, redis_url, has_begun)
    return findings.doubts_if_free()


def _findings(
    settings: Settings, redis_url: str | None, has_begun: bool, *, elsewhere: Collection[str] = ()
) -> Findings:
    """Do the checks in this process but those done elsewhere; look for doubts if none fails."""
    checks = checks_of_start(settings, redis_url, has_begun=has_begun)
    findings = _run_checks([check for check in checks if check.name not in elsewhere])
    if findings.problems:
        return findings
    return Findings([], [*findings.doubts, *doubts_about(settings, redis_url=redis_url)])


def _findings_of_two(
    settings: Settings, redis_url: str | None, forks: Forks, has_begun: bool
) -> Findings | None:
    """Return the findings of another process and this one; None if the other did not finish."""
    environment = environment_of("learner", settings)
    command = Command("checks", "checks", (*PYTHON, CHECKS), Path(os.devnull), environment)
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out:
        request = {
            "settings": settings.model_dump(mode="json"),
            "redis_url": redis_url,
            "has_begun": has_begun,
        }
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        with os.fdopen(2, "wb", closefd=False) as err:
            child = begin_program(command, out, err, stdin) if forks.has_room else None
            try:
                checks = checks_of_start(settings, redis_url, has_begun=has_begun)
                here = _run_checks([check for check in checks if check.name in HERE])
                if child is None:
                    forks.wait(command)
                    child = forks.start(command, out, err, stdin)
                if child is None:
                    return None
                code = _wait_for_exit(child, _limit_s(settings, redis_url))
            finally:
                if child is not None:
                    child.kill()
                    child.wait()
        out.seek(0)
        if code:
            return None
        there = Findings(**json.load(out))
    new = [problem for problem in there.problems if problem not in here.problems]
    return Findings([*here.problems, *new], [*here.doubts, *there.doubts])


def _wait_for_exit(child: ForkedChild, limit_s: float) -> int:
    try:
        return child.wait(limit_s)
    except TimeoutError:
        raise SettingsError(
            f"the checks before a start must end within {limit_s:.0f} s, got one that hangs; run "
            f"`nyala doctor` with the same settings, which names it"
        ) from None


def _limit_s(settings: Settings, redis_url: str | None) -> float:
    """Return the time limit of all checks together."""
    checks = checks_of_start(settings, redis_url) + checks_of_doubt(settings, redis_url)
    return sum(check.limit_s for check in checks)


def main() -> None:
    """Read the settings and write the findings; end if the parent process ends."""
    die_with_parent()
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # an environment or a reward may print
        settings = Settings.model_validate(request["settings"])
        findings = _findings(settings, request["redis_url"], request["has_begun"], elsewhere=HERE)
        json.dump(findings._asdict(), out)


if __name__ == "__main__":
    main()
