"""The model that a run begins with if `run.model` is `init`: made, kept, replaced when it differs.

`nyala up` and `nyala init-model` make it.

Two processes run one after the other. A process of the actors exports demonstrations of the
environment, and the tokenizer; a process of the learner builds the character model and trains it on
them. This module runs both and shows their progress.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from configs import durable
from configs.errors import NyalaError, SettingsError
from configs.hashes import (
    code_hash,
    code_of_rows,
    data_files,
    data_hash,
    environment_code,
)
from configs.loader import save
from configs.settings import RunSettings, Settings
from configs.tables.run import LIVE_AGENTS

from .plan import environment_of
from .process import PYTHON, Command, ForkedChild, Forks
from .run_folder import RunFolder

STAMP = "made_from.json"
NUM_PAIRS = 20_000  # several times what a short supervised start sees
NUM_CHATS = 4000  # of live agents; a template renders each, in half a millisecond
NUM_TEXTS = 1000  # whose characters the model has where there is no supervised start
TAIL_LINES = 12  # of a failed process's log: enough for the last traceback

Show = Callable[[str, int, int], None]
"""Called with a label, the step and the number of steps; 0 of 0 while the number is unknown."""


def is_made(settings: Settings, folder: Path) -> bool:
    """True if `folder` has the model that these settings make, by its stamp.

    Raises:
        SettingsError: As `stamp`.
    """
    try:
        return (folder / STAMP).read_text(encoding="utf-8").strip() == stamp(settings)
    except FileNotFoundError:
        return False


def stamp(settings: Settings) -> str:
    """Return a hash of everything that the model depends on: settings, code and data.

    Raises:
        SettingsError: A file of the environment cannot be read.
    """
    run = settings.run
    alone = [_contents(part) for part in run.by_environment.values()]
    names = {"seed", "environment", "environment_settings"}
    parts: dict[str, object] = {**({"environments": alone} if run.environments else alone[0])}
    parts |= {
        "run": run.model_dump(
            mode="json", include=names | ({"environments"} if run.environments else set())
        ),
        "learner": {
            key: value
            for key, value in settings.learner.model_dump(mode="json").items()
            if key.startswith(("init_", "warm_start_"))
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _contents(run: RunSettings) -> dict[str, str]:
    """Hash the code and the data of a run that has one environment."""
    digests = {"code": environment_code(run)} if ":" in run.environment else {}
    if run.environment_requirements:
        digests["requirements"] = " ".join(run.environment_requirements)
    digests |= {key: data_hash(name) for key, name in data_files(run).items()}
    if run.environment == LIVE_AGENTS:
        for key, name in code_of_rows(run).items():
            digests[key] = code_hash(name, setting=f"run.environment_settings.{key}")
    return digests


def make_if_needed(
    settings: Settings,
    target: Path,
    console: Console,
    *,
    plain: bool = False,
    forks: Forks | None = None,
) -> bool:
    """Make the model in `target` with a progress bar, unless the model of these settings is there.

    A model of other settings is deleted and replaced.

    Returns:
        Whether the model was made.

    Raises:
        NyalaError: As `make_model` and `stamp`.
    """
    if is_made(settings, target):
        return False
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    is_live = console.is_terminal and not plain
    shown: set[str] = set()
    with Bar(*columns, console=console, disable=not is_live) as bar:
        task = bar.add_task("making the model", total=None)

        def show(label: str, step: int, steps: int) -> None:
            bar.update(task, description=label, completed=step, total=steps or None)
            if not is_live and label not in shown:
                shown.add(label)
                console.print(f"init-model: {label}", highlight=False)

        make_model(settings, target, show=show, forks=forks)
    return True


def make_model(settings: Settings, target: Path, *, show: Show, forks: Forks | None = None) -> None:
    """Make the model in `target`, and delete what was there once the new model is complete.

    Raises:
        SettingsError: One of the two processes refused; the text is its own.
        NyalaError: One of them failed; the text has the end of its log.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".init-", dir=target.parent) as scratch:
        shown, model = Path(scratch) / "demonstrations", Path(scratch) / "model"
        config = Path(scratch) / "config.yaml"
        save(settings, config)
        count = NUM_CHATS if settings.run.has_agents else NUM_PAIRS
        count = count if settings.learner.warm_start_steps else NUM_TEXTS
        show("writing examples", 0, 0)
        for _ in run_to_end(settings, "actor", export_command(config, shown, count=count)):
            pass
        show("building the model", 0, settings.learner.warm_start_steps)
        command = warm_start_command(config, shown, model)
        for line in run_to_end(settings, "learner", command, forks):
            report = progress_in(line)
            if report is not None:
                show("supervised start", *report)
        (model / STAMP).write_text(stamp(settings) + "\n", encoding="utf-8")
        model.chmod(0o700)
        durable.DISK.remove(target)
        durable.sync_tree(model)
        durable.move(model, target)


def reuse(settings: Settings, archived: Path, folder: RunFolder) -> bool:
    """Copy the model of an archived run if these settings make the same; return whether it did."""
    if not is_made(settings, archived / "init"):
        return False
    folder.path.mkdir(parents=True, exist_ok=True)
    shutil.copytree(archived / "init", folder.init)
    folder.init.chmod(0o700)
    return True


def export_command(config: Path, out: Path, *, count: int) -> list[str]:
    """Return the command that exports demonstrations and the tokenizer."""
    # Block 1 of the training items, as the run itself begins with block 0.
    arguments = {"config": config, "out": out, "count": count, "seed": 1}
    return [*role_verb("actors", "export", arguments), "--init"]


def warm_start_command(config: Path, demonstrations: Path, out: Path) -> list[str]:
    """Return the command that builds and trains the model."""
    arguments = {"config": config, "demonstrations": demonstrations, "out": out}
    return role_verb("learner", "warm-start", arguments)


def role_verb(package: str, verb: str, arguments: Mapping[str, object]) -> list[str]:
    """Return the command of a role's verb with its flags."""
    flags = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
    return [*PYTHON, package, verb, *flags]


def run_to_end(
    settings: Settings, role: str, words: list[str], forks: Forks | None = None
) -> Iterator[str]:
    """Run a command and yield the lines that it prints; its log is shown only if it fails."""
    environment = environment_of(role, settings, inherited=os.environ)
    command = Command(role, role, tuple(words), Path(os.devnull), environment)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process, out = _begin(command, log, forks)
        try:
            with out:
                yield from out
            code = process.wait()
        finally:
            process.kill()  # does nothing unless this process was interrupted
            process.wait()
        if code != 0:
            log.seek(0)
            raise _failure(
                " ".join(words[len(PYTHON) : len(PYTHON) + 2]), code, log.read().splitlines()
            )


def _begin(
    command: Command, log: TextIO, forks: Forks | None
) -> tuple[subprocess.Popen[str] | ForkedChild, TextIO]:
    """Begin a command as a fork or a new program; return it with its standard output."""
    if forks is not None:
        forks.wait(command)
        reader, writer = os.pipe()
        with os.fdopen(writer, "wb") as out:
            child = forks.start(command, out, log.buffer)
        if child is not None:
            return child, os.fdopen(reader, encoding="utf-8")
        os.close(reader)
    process = subprocess.Popen(
        command.arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=dict(command.environment),
    )
    assert process.stdout is not None
    return process, cast("TextIO", process.stdout)


def _failure(command: str, code: int, log: list[str]) -> NyalaError:
    """Return the error of a failed process: its logged event, else the end of its log."""
    try:
        return SettingsError(str(json.loads(log[-1])["event"]))
    except (IndexError, ValueError, KeyError, TypeError):
        tail = "".join(f"\n  {line}" for line in log[-TAIL_LINES:])
        step = "mend what the end of its log says"
        if code == -signal.SIGKILL:
            step = "free memory, if this machine had too little"
        return NyalaError(f"`python -m {command}` must end with 0, got {code}; {step}:{tail}")


def progress_in(line: str) -> tuple[int, int] | None:
    """Read the step and the number of steps from a line; None if it is not of progress."""
    try:
        row = json.loads(line)
        return int(row["step"]), int(row["steps"])
    except (ValueError, KeyError, TypeError):
        return None
