"""Checks of settings or a pack: those of `nyala up`, and what a run would find out later.

A run that is up holds its addresses itself; the figures of its roles in the store are checked too.
A check returns the text of its line, or raises what `nyala doctor` shows as a failure.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from actors.chat import read_prompt, text_of
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.registry import for_each, make_dataset
from broker.transport.keys import check_private
from configs.errors import NyalaError, SettingsError
from configs.settings import RunSettings, Settings
from configs.tables.environments import OF_ROWS
from console.run.checks.check import Check
from console.run.checks.machine import check_key_files
from console.run.checks.reward import REWARD_TIMEOUT_S, check_answers
from console.run.plan import given_redis
from console.run.preflight import (
    checks_of_doubt,
    checks_of_room,
    checks_of_start,
    limit_of_environments,
)
from console.run.run_folder import RunFolder, RunState, settings_of
from console.run.user_files import resolve
from console.verbs.join_pack import open_pack

from .live_run import run_checks

SAMPLING = ("model", "data")
"""Groups of checks that concern actors wherever they are."""
LONGEST_PROMPT = 60
"""Characters of a question that are shown."""


def settings_checks(settings: Settings, path: Path) -> list[Check]:
    """List the checks of settings, group by group.

    Those of a run that has begun look at its store and its files too. For a run that is up, its own
    addresses are left out.

    Args:
        settings: Settings of a file, or of a run.
        path: File or folder that they were read from.
    """
    folder = RunFolder(settings.run.folder)
    if not path.is_dir():
        settings = resolve(settings)
    url = _redis_of(settings, folder)
    has_begun = folder.state is RunState.UNFINISHED
    checks = [
        *checks_of_start(settings, url, has_begun=has_begun),
        *checks_of_doubt(settings, url),
    ]
    if folder.is_held:  # what listens there is the run itself
        checks = [check for check in checks if check.name != "addresses"]
    checks += [
        *checks_of_room(settings),
        *_own_checks(settings),
        *_secrets_checks(settings, folder),
    ]
    if folder.state is not RunState.NEW:
        checks += run_checks(settings, folder, url)
    groups = list(dict.fromkeys(check.group for check in checks))
    return sorted(checks, key=lambda check: groups.index(check.group))


def sampling_checks(settings: Settings) -> list[Check]:
    """List the checks of settings that a machine with only actors needs."""
    checks = [*checks_of_start(settings, None), *checks_of_doubt(settings, None)]
    return [check for check in [*checks, *_own_checks(settings)] if check.group in SAMPLING]


def _redis_of(settings: Settings, folder: RunFolder) -> str | None:
    """Return the URL of an existing server; None = the run starts its own."""
    if folder.is_held and folder.state is RunState.UNFINISHED and folder.redis_url.exists():
        return folder.redis_url.read_text(encoding="utf-8").strip()
    return given_redis(settings.buffer, folder)


def _own_checks(settings: Settings) -> list[Check]:
    """List the checks of settings that only `nyala doctor` makes."""
    run, environments_s = settings.run, limit_of_environments(settings.run)
    return [
        Check("model", "stop tokens", lambda: describe_stops(run), "opens", limit_s=120),
        Check("data", "rows", lambda: describe_rows(run), "reward", limit_s=environments_s),
        Check(
            "data",
            "answers",
            lambda: check_answers(settings),
            "reward",
            limit_s=2 * environments_s,
        ),
    ]


def _secrets_checks(settings: Settings, folder: RunFolder) -> list[Check]:
    """List the checks of a run's files that only their owner may read."""
    checks = []
    if settings.broker.keys is None and folder.keys.is_dir():
        checks.append(Check("network", "run's keys", lambda: check_key_files(folder.keys)))
    if folder.redis_url.exists():
        checks.append(Check("network", "Redis' address", lambda: _private_file(folder.redis_url)))
    return checks


def describe_stops(run: RunSettings) -> str:
    """Name the tokens and strings that end a turn.

    Raises:
        SettingsError: The tokenizer cannot be loaded, or has no end-of-sequence token.
    """
    if run.model == "init" and not (run.folder / "init").is_dir():
        return "those of the character model that is made first"
    tokenizer = ModelTokenizer.for_run(run)
    texts = [repr(tokenizer.decode([token])) for token in tokenizer.stop_token_ids]
    return ", ".join([*texts, *(f"the string {string!r}" for string in run.stop)])


def describe_rows(run: RunSettings) -> str:
    """Count the rows of each dataset, and show the first question.

    Raises:
        NyalaError: The rows cannot be read, or not within `REWARD_TIMEOUT_S`.
    """
    return "; ".join(for_each(run, _rows_of, limit_s=REWARD_TIMEOUT_S))


def _rows_of(run: RunSettings) -> str:
    if run.environment not in OF_ROWS:
        return f"{run.environment} makes its own"
    dataset = make_dataset(run)
    training, held_out, _ = dataset.counts
    asked = text_of(read_prompt(dataset.begin(0, run.seed, held_out=not run.is_trained).prompt))
    shown = asked if len(asked) <= LONGEST_PROMPT else f"{asked[:LONGEST_PROMPT]}..."
    return f"{training} rows to train on, {held_out} held out; the first asked is {shown!r}"


def _private_file(path: Path) -> str:
    check_private(path)
    return f"{path.name} is its owner's alone"


# --------------------------------------------------------------------------------------------------
# Checks of a machine that is to join a run, by the pack that it was given.
#
# What the broker would refuse after minutes of loading is found first: other environments, rewards,
# data or packages than the run's, a broker that cannot be reached.

GROUP = "pack"
CONNECT_S = 5.0


def pack_checks(pack: Path, overrides: Sequence[str]) -> list[Check]:
    """List the checks of a pack, or the single check that fails if it does not fit the run.

    The pack is unpacked into this user's cache, unless it has been before.

    Args:
        pack: A file of `nyala join-pack`.
        overrides: Overrides as typed.
    """
    try:
        folder, changed = open_pack(pack, overrides)
        settings = settings_of(folder, changed)
    except NyalaError as error:
        refusal = error

        def refuse() -> str:
            raise refusal

        return [Check(GROUP, "same as run", refuse)]
    endpoint = settings.broker.endpoint
    return [
        Check(GROUP, "same as run", lambda: f"{settings.run.name}: no hash differs"),
        Check(GROUP, "broker", lambda: check_reached(endpoint)),
        *sampling_checks(settings),
    ]


def check_reached(endpoint: str) -> str:
    """Check that the broker's port accepts connections from here.

    Raises:
        SettingsError: The port does not answer.
    """
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_S):
            return f"{endpoint} takes connections"
    except OSError as error:
        raise SettingsError(
            f"broker.endpoint must be reachable from this machine, got {endpoint}: "
            f"{error.strerror or error}; check that the run is up, that no firewall closes this "
            f"port, and that the address is right"
        ) from None
