"""Creation of a run from settings, and access to one that exists."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from configs.errors import SettingsError
from console.live.stop import stop_limit_s
from console.report.record.versions import NAME as VERSIONS
from console.run.own_files import resolve
from console.run.run_folder import run_folder_of, settings_of

from .run import Run
from .up_process import UpProcess, written_at


def create_run(
    settings: str | os.PathLike[str],
    *,
    method: str | None = None,
    fresh: bool = False,
    detached: bool = False,
    **tables: Mapping[str, object],
) -> Run:
    """Start a run on this machine, as `nyala up` does, and return as soon as it has begun.

    A run of this name that was stopped goes on from its newest checkpoint; one that has finished
    stays as it is.

    The run ends with this program: when Python ends, however it does, the run saves and stops, and
    the same call goes on with it. A kernel that is restarted is a program that ends.

    Args:
        settings: A settings file, or the folder of a run to go on with.
        method: A published method by name, such as `"GSPO"`.
        fresh: Archive an earlier run of this name and begin anew.
        detached: The run goes on when this program has ended; `nyala stop` ends it then.
        tables: Settings by table, over those of the file: `learner={"lr": 1e-6}`. A value replaces
            that of the file, tables and lists too.

    Raises:
        SettingsError: A setting is wrong, or the run cannot be started on this machine.
        NyalaError: It ended while it began.

    Example:
        run = nyala.create_run("mine.yaml", run={"name": "mine-2"}, learner={"lr": 1e-6})
    """
    overrides = list(_overrides(tables))
    typed = settings_of(Path(settings), overrides)
    folder = resolve(typed).run.folder
    sign = folder / VERSIONS
    before = written_at(sign)
    arguments = [os.fspath(settings)]
    arguments += [text for override in overrides for text in ("--set", override)]
    arguments += ["--method", method] if method is not None else []
    arguments += ["--fresh"] if fresh else []
    process = UpProcess(
        arguments,
        # Beside the folder, which `fresh` moves away.
        log=folder.with_name(f".{folder.name}.up.log"),
        stop_s=stop_limit_s(typed),
        detached=detached,
    )
    process.wait_until_begun(sign, before)
    return Run(folder, process)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Return a run that exists, whoever started it; nothing is started.

    Args:
        folder: Its folder, or its settings file.

    Raises:
        SettingsError: There is no such run.
    """
    return Run(run_folder_of(Path(folder)).path)


def _overrides(tables: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Write settings as `table.key=value`, the value as JSON, which is YAML."""
    for table, keys in tables.items():
        if not isinstance(keys, Mapping):
            raise SettingsError(
                f"{table} must be a table of settings, got {keys!r}; write {table}={{'key': value}}"
            )
        for key, value in keys.items():
            yield f"{table}.{key}={json.dumps(value, default=os.fspath)}"
