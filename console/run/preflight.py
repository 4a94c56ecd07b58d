"""Checks of `nyala up` before it starts anything: each raises one sentence, or passes.

Owns the lists of checks, which `nyala doctor` goes through as well; each asks the room concerned.
Nothing is changed here: no folder, no key in Redis, no process that stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.errors import NyalaError, SettingsError
from configs.hashes import is_hosted
from configs.machine.gpus import visible_gpus
from configs.settings import RunSettings, Settings

from .checks.addresses import check_addresses
from .checks.check import Check, Doubt
from .checks.devices import check_devices
from .checks.key_files import check_keys
from .checks.model import (
    check_engine,
    check_model,
    check_parallel,
    check_template,
    small_engine_warning,
)
from .checks.reward import REWARD_TIMEOUT_S, check_reward, check_stop, weights_warning
from .checks.store import GROUP, REACHED, check_redis, store_checks
from .checks.trackers import check_trackers
from .placement import shared_card_warning

INSTALL_S = 600.0
"""Of packages into an environment's own Python."""


def checks_of_start(settings: Settings, redis_url: str | None) -> list[Check]:
    """List the checks without which no run starts.

    Args:
        settings: Of the run.
        redis_url: The server to use; None = one is started.
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
        Check("network", "trackers", lambda: check_trackers(settings.trackers, run), limit_s=120),
        Check("data", "reward", lambda: check_reward(settings), limit_s=environments_s),
    ]


def checks_of_doubt(settings: Settings, redis_url: str | None) -> list[Check]:
    """List the checks of what `nyala up` warns of and starts all the same."""
    run, environments_s = settings.run, limit_of_environments(settings.run)
    doubts = [
        Check(
            "data",
            "weights",
            lambda: _doubt(weights_warning(settings), "parts of the reward"),
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


def refuse_what_cannot_run(settings: Settings, *, redis_url: str | None) -> None:
    """Do all checks of a start and report all that fail.

    Raises:
        SettingsError: At least one check failed.
    """
    problems = []
    for check in checks_of_start(settings, redis_url):
        try:
            check.look()
        except NyalaError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError(_listed(problems))


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
