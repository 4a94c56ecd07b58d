"""Checks of addresses, devices, keys and trackers before a run starts.

The first line of a check says what holds if it returns. It returns figures for `nyala doctor`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from broker.transport.keys import SERVERS, check_private, load_pair
from configs.errors import SettingsError
from configs.machine import gpu_left_out, query_gpus, visible_gpus
from configs.metrics import endpoint_of
from configs.settings import (
    AgentSettings,
    BrokerSettings,
    LearnerSettings,
    RunSettings,
    Settings,
    TrackerSettings,
)
from configs.user_code import missing
from configs.user_python import UserPython, command_words, installed_python
from console.run.redis_server import is_free
from learner.reporting.trackers.delivery_process import trackers_of

# --------------------------------------------------------------------------------------------------
# Check that the command of agents can be started.


def check_agents(agents: AgentSettings) -> str:
    """The command of agents names a program and files of this machine, and its Python is there.

    Raises:
        SettingsError: It does not, or its packages cannot be installed.
    """
    words = command_words(agents)
    if not words:
        return "started by hand: agents.command is null"
    program = command_words(agents, installed_python(UserPython.of_agents(agents)))[0]
    if shutil.which(program) is None:
        raise SettingsError(
            f"agents.command must begin with a program that this machine can start, got "
            f"{words[0]!r}; install it, or give its path"
        )
    for word in words[1:]:
        if word.endswith(".py") and not Path(word).is_file():
            raise SettingsError(
                f"agents.command must name files that are there, got {word!r}: {missing(word)}; "
                f"correct the path, which is looked for beside the settings file and here"
            )
    how = "for all conversations" if agents.serves_many else "for each conversation"
    return f"{words[0]}, started once {how}"


def agents_room_warning(run: RunSettings) -> str | None:
    """Name the bounds of conversations that are left at defaults, which suit single questions.

    None where they are set, or no live agents are asked.
    """
    named = ("max_prompt_tokens", "max_completion_tokens")
    left = {
        f"run.{name}": getattr(run, name)
        for name in named
        if getattr(run, name) == RunSettings.model_fields[name].default
    }
    if not run.has_agents or not left:
        return None
    values = " and ".join(f"{name} = {value}" for name, value in left.items())
    return (
        f"run.max_prompt_tokens and run.max_completion_tokens should be set for live agents, got "
        f"the default of {values}: the first bounds a first call with its tools, the second all "
        f"that follows, with what tools return; beyond them calls are refused, and a conversation "
        f"of tens of turns takes many thousands"
    )


# --------------------------------------------------------------------------------------------------
# Check that the addresses on which processes of this machine listen are free.


def check_addresses(settings: Settings) -> str:
    """Each role can listen where its settings put it, and no two want the same port.

    Raises:
        SettingsError: An address is taken, wanted twice, or not of this machine.
    """
    wanted: dict[int, str] = {}
    places = list(_endpoints(settings))
    for setting, endpoint in places:
        port = check_address(setting, endpoint)
        if port and port in wanted:
            raise SettingsError(
                f"{setting} must have a port of its own, got {endpoint}, the port of "
                f"{wanted[port]}; choose another"
            )
        wanted[port] = setting
    return ", ".join(f"{setting} {endpoint}" for setting, endpoint in places)


def check_address(setting: str, endpoint: str) -> int:
    """A process of the run can listen at `endpoint`; returns the port, 0 = any free one.

    An address with the host `*` or the port 0 is not tried.

    Raises:
        SettingsError: It cannot listen there.
    """
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or 0
    if host != "*" and port != 0 and not is_free(host, port):
        raise SettingsError(
            f"{setting} must be an address that is free on this machine, got {endpoint}, "
            f"which is in use or not of this machine; stop the program that listens there, choose "
            f"another port ({parts.scheme}://127.0.0.1:0 takes any free one), or an address that "
            f"`ip address` lists"
        )
    return port


def _endpoints(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield where processes of this machine listen, each with its setting."""
    yield "broker.endpoint", settings.broker.endpoint
    yield "learner.publisher_endpoint", settings.learner.publisher_endpoint
    for table in ("broker", "learner"):
        if (page := getattr(settings, table).metrics_endpoint) is not None:
            yield f"{table}.metrics_endpoint", page
    if (page := settings.actors.metrics_endpoint) is not None:
        for number in range(settings.actors.count):
            yield "actors.metrics_endpoint", endpoint_of(page, number)


# --------------------------------------------------------------------------------------------------
# Check that the learner gets the GPUs that it is given, before it starts.

TORCH_S = 120.0
"""Time to import torch and, if it sleeps, to wake the driver."""
# Runs in a process of its own: one that has asked for CUDA cannot fork processes that use it.
ASK_TORCH = "import torch; print(int(torch.cuda.is_available()), torch.version.cuda or '')"


def check_devices(learner: LearnerSettings) -> str:
    """There are as many GPUs as the settings require, and torch sees those that there are.

    Raises:
        SettingsError: There are fewer, or torch does not see them.
    """
    if learner.device == "cpu":
        return "cpu"
    count = len(visible_gpus())
    if count and query_gpus("index"):
        _check_torch(learner)
    name, ranks = "learner.ranks", learner.ranks
    if learner.min_ranks is not None:
        name, ranks = "learner.min_ranks", learner.min_ranks
    if learner.device == "cuda" and count < ranks:
        raise SettingsError(
            f"{name} must be <= the GPUs of this machine = {count}, got {ranks}; use fewer ranks, "
            f"or learner.device=cpu"
        )
    return f"{learner.device}, {count} GPU(s)"


def _check_torch(learner: LearnerSettings) -> None:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_S,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return  # each role reports what is wrong with torch when it starts
    is_available, _, cuda = asked.stdout.strip().partition(" ")
    error = gpu_left_out(learner.device, cuda or None) if is_available == "0" else None
    if error is not None:
        raise SettingsError(error)


# --------------------------------------------------------------------------------------------------
# Check the keys of a run: complete, and open to nobody else.


def check_keys(broker: BrokerSettings) -> str:
    """Keys that were made elsewhere are complete, and each secret is its owner's alone.

    Raises:
        SettingsError: One is missing, malformed or readable by others.
    """
    if broker.keys is None:
        return "made when the run begins"
    return check_key_files(broker.keys)


def check_key_files(folder: Path) -> str:
    """The keys of broker and learner are there, and each secret is its owner's alone.

    Raises:
        SettingsError: One is missing, malformed or readable by others.
    """
    for name in SERVERS:
        load_pair(folder, name)
    secrets = sorted(folder.glob("*.key"))
    for path in secrets:
        check_private(path)
    return f"{len(secrets)} secrets in {folder}"


# --------------------------------------------------------------------------------------------------
# Check of the trackers: their packages and keys are there, and their servers answer.


def check_trackers(trackers: TrackerSettings, run: RunSettings) -> str:
    """Each tracker that the settings name can work on this machine.

    Raises:
        SettingsError: One cannot: its package, key or server is missing.
    """
    chosen = trackers_of(trackers, run)
    for tracker in chosen.values():
        tracker.check_requirements()
    return ", ".join(chosen) or "none"
