"""Plan of a run: cards, environment and command of each process, and the files that they read.

`nyala up` starts all processes by it, `nyala actor`, `agents`, `learner` and `broker` one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from actors.engine.choice import ENGINES, choose_engine
from broker.transport.keys import HOST, make_client, make_keys
from configs.errors import SettingsError
from configs.loader import load, save
from configs.machine import compiled_folders, visible_gpus
from configs.metrics import endpoint_of
from configs.secrets import FILE_VARIABLE, VARIABLE, redis_url_of, write_secret
from configs.settings import BufferSettings, Settings
from configs.user_code import ROOT

from .process import PYTHON, Command
from .redis_server import RedisServer, configure, free_port, is_free
from .run_folder import RunFolder
from .user_files import resolve, with_value

# --------------------------------------------------------------------------------------------------
# Placement of processes on this machine: GPUs, threads, environment variables.
#
# Pure. The learner's ranks come first, then the actors, then the teachers. If there are fewer GPUs
# than wanted, actors and teachers share those after the learner's ranks, or all if there are none.

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def learner_gpus(settings: Settings, gpus: Sequence[str]) -> list[str]:
    """Choose the GPUs of the learner's ranks; none on a CPU."""
    return [] if settings.learner.device == "cpu" else list(gpus[: settings.learner.ranks])


def actor_gpus(settings: Settings, gpus: Sequence[str], number: int) -> list[str]:
    """Choose the GPUs of one actor, counted from 0; others may share them."""
    rest = list(gpus[len(learner_gpus(settings, gpus)) :]) or list(gpus)
    size = settings.actors.tensor_parallel_size
    if len(rest) < size:
        rest = list(gpus)
    first = (number * size) % max(1, len(rest) - len(rest) % size or len(rest))
    return rest[first : first + size]


def environment_of(
    role: str,
    settings: Settings,
    *,
    gpus: Sequence[str] = (),
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the environment variables of a process.

    They are those of `inherited`, with threads, `gpus` and the folders of compiled code. An actor
    does not get the URL of Redis.
    """
    environment = dict(inherited)
    threads = {"actor": settings.actors.threads, "learner": settings.learner.threads}.get(role, 1)
    for name in THREAD_VARIABLES:
        environment[name] = str(threads)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"  # its threads would compete for the same cores
    if environment.get("PYTHONPATH"):  # this project first, as its packages have common names
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    if role in {"actor", "learner"}:
        environment |= compiled_folders(environment)
    if role in {"actor", "agents"}:
        for name in (VARIABLE, FILE_VARIABLE):
            environment.pop(name, None)  # they have no access to Redis
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def shared_card_warning(settings: Settings, gpus: Sequence[str]) -> str | None:
    """Warn of a card on which an actor would measure free memory while the learner takes some.

    None where there is no such card.
    """
    actors = settings.actors
    engine = choose_engine(settings, on_gpu=bool(gpus)).engine
    if not ENGINES[engine].takes_free_memory or actors.kv_cache_gib is not None:
        return None
    taken = {gpu for number in range(actors.count) for gpu in actor_gpus(settings, gpus, number)}
    shared = taken.intersection(learner_gpus(settings, gpus))
    if not shared:
        return None
    return (
        f"learner and actor share GPU {', '.join(sorted(shared))}, and the actor counts what the "
        f"learner takes meanwhile as its own: set actors.kv_cache_gib, and "
        f"actors.gpu_memory_utilization to what is free when it starts"
    )


# --------------------------------------------------------------------------------------------------
# Plan of a run from checked settings: resolved paths, files of the run folder, commands.


def given_redis(buffer: BufferSettings, folder: RunFolder) -> str | None:
    """Return the URL of a server that the user runs; None = this run starts its own.

    It is that of the environment, of `buffer.url`, or of an earlier session, in this order.

    Raises:
        SettingsError: The environment names a file that cannot be read.
    """
    url = redis_url_of()
    if url is not None:
        return url
    if buffer.url is not None:
        return buffer.url
    if folder.redis_url.exists() and not folder.redis.exists():
        return folder.redis_url.read_text(encoding="utf-8").strip()
    return None


def prepare(settings: Settings, folder: RunFolder, *, redis_url: str | None) -> RedisServer | None:
    """Write the files that the processes read: keys, the store's URL, config.yaml.

    Keys that are there are kept; the other files are replaced. Port 0 of `broker.endpoint` becomes
    a free one.

    Returns:
        The server to start; None if `redis_url` names a running one.

    Raises:
        SettingsError: Keys cannot be added, or no server is installed that is new enough.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    if settings.broker.keys is None:
        make_keys(folder.keys)
    _make_client_keys(settings, folder)
    server = None
    if redis_url is None:
        server = configure(
            folder.redis, folder.redis_url, maxmemory_mb=settings.buffer.maxmemory_mb
        )
    else:
        write_secret(folder.redis_url, redis_url)
    # The URL has a password; it stays in its own file.
    save(with_value(_with_port(settings, folder), "buffer", "url", None), folder.config)
    return server


def commands(settings: Settings, folder: RunFolder) -> list[Command]:
    """List the processes of a run besides Redis, in the order in which they are shown."""
    gpus = visible_gpus()
    actors = [
        _command(
            f"actor-{number}",
            "actor",
            "actors",
            folder,
            environment_of("actor", settings, gpus=actor_gpus(settings, gpus, number)),
            flags=(
                *("--name", f"actor-{number}", "--key", f"actor-{number}"),
                *metrics_flags(settings, number),
            ),
        )
        for number in range(settings.actors.count)
    ]
    teachers = [
        _command(
            f"teacher-{number}",
            "teacher",
            "actors",
            folder,
            environment_of(
                "actor", settings, gpus=actor_gpus(settings, gpus, settings.actors.count + number)
            ),
            flags=("--name", f"teacher-{number}", "--key", f"teacher-{number}", "--teacher", name),
        )
        for number, name in enumerate(teachers_to_start(settings))
    ]
    learner = environment_of("learner", settings, gpus=learner_gpus(settings, gpus))
    host = _command("agents", "agents", "agents", folder, environment_of("agents", settings))
    return [
        _command("broker", "broker", "broker", folder, environment_of("broker", settings)),
        _command("learner", "learner", "learner", folder, learner),
        *actors,
        *teachers,
        *([host] if starts_agents(settings) else []),
    ]


def teachers_to_start(settings: Settings) -> list[str]:
    """Names of the teachers that `nyala up` starts, once for each process."""
    names = settings.algorithm.teacher_processes
    return [name for name in names for _ in range(settings.actors.teachers)]


def starts_agents(settings: Settings) -> bool:
    """Whether `nyala up` starts a host of agents."""
    return settings.run.has_agents and settings.agents.command is not None


def awaited_agents(settings: Settings) -> str | None:
    """Say that a run waits for agents which others start; None = it does not."""
    if not settings.run.has_agents or starts_agents(settings):
        return None
    return (
        f"agents are awaited: agents.command is null, so start them by hand with `nyala agents "
        f"{settings.run.folder} --print`, or set it"
    )


def metrics_flags(settings: Settings, number: int) -> tuple[str, ...]:
    """Return the flags that give actor `number` of this machine a page of metrics of its own."""
    endpoint = settings.actors.metrics_endpoint
    if endpoint is None or not number:
        return ()
    return ("--set", f"actors.metrics_endpoint={endpoint_of(endpoint, number)}")


def redis_command(server: RedisServer, folder: RunFolder, settings: Settings) -> Command:
    """Return the process of the run's own server."""
    environment = environment_of("redis", settings)
    return Command("redis", "redis", server.arguments, folder.log("redis"), environment)


def role_command(
    role: str, package: str, path: Path, overrides: Sequence[str], settings: Settings
) -> Command:
    """Return the command of one process that a person starts by hand.

    Args:
        role: `actor`, `agents`, `learner` or `broker`.
        package: Its folder.
        path: A settings file, or the folder of a run to join.
        overrides: Changes to the settings, as on the command line.
        settings: The settings of `path` with `overrides`.
    """
    config = path
    if path.is_dir():
        config = path / "config.yaml"
        overrides = [f"run.directory={json.dumps(str(settings.run.directory))}", *overrides]
    flags = [text for override in overrides for text in ("--set", override)]
    arguments = (*PYTHON, package, "--config", str(config), *flags)
    log = RunFolder(settings.run.folder).log(role)
    return Command(role, role, arguments, log, environment_of(role, settings))


def keep_settings(settings: Settings) -> None:
    """Write the config.yaml of a run whose processes are started one by one, unless it is there.

    `nyala status`, `top`, `report` and `join-pack` find a run by it.
    """
    folder = RunFolder(settings.run.folder)
    if not folder.config.exists():
        folder.path.mkdir(parents=True, exist_ok=True)
        # The URL has a password, which config.yaml does not hold.
        save(with_value(resolve(settings), "buffer", "url", None), folder.config)


def _make_client_keys(settings: Settings, folder: RunFolder) -> None:
    """Make a key for each actor, teacher and host of agents, which they keep over restarts.

    Raises:
        SettingsError: The keys cannot be written to their folder.
    """
    keys = settings.broker.keys or folder.keys
    try:
        for number in range(settings.actors.count):
            make_client(keys, f"actor-{number}")
        for number in range(len(teachers_to_start(settings))):
            make_client(keys, f"teacher-{number}")
        if starts_agents(settings):
            make_client(keys, HOST, role=HOST)
    except OSError as error:
        raise SettingsError(
            f"broker.keys must be a folder to which a key for each actor can be added, got {keys}: "
            f"{error.strerror}; make it writable, or leave broker.keys null"
        ) from None


def _command(
    name: str,
    role: str,
    package: str,
    folder: RunFolder,
    environment: dict[str, str],
    *,
    flags: Sequence[str] = (),
) -> Command:
    arguments = (*PYTHON, package, "--config", str(folder.config), *flags)
    return Command(name, role, arguments, folder.log(name), environment)


def _with_port(settings: Settings, folder: RunFolder) -> Settings:
    """Choose the port if the settings leave it open: the run's earlier one if it is free."""
    parts = urlsplit(settings.broker.endpoint)
    if parts.port != 0:
        return settings
    host = parts.hostname or "127.0.0.1"
    port = 0
    if folder.config.exists():
        port = urlsplit(load(folder.config).broker.endpoint).port or 0
    if port == 0 or not is_free(host, port):
        port = free_port(host)
    return with_value(settings, "broker", "endpoint", f"tcp://{host}:{port}")
