"""Programs of the user: the command of agents, and a Python for the user's code alone.

That Python is one of the user's, or an environment that uv makes once.

Virtual environments are kept under `~/.cache/nyala/environments`, by their requirements and the
version of Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import structlog
from packaging.requirements import InvalidRequirement, Requirement

from configs.errors import SettingsError
from configs.settings import AgentSettings, RunSettings
from configs.user_code import looked_in, missing

log = structlog.get_logger()

INSTALL_S = 1800.0  # some packages bring gigabytes along
POLL_S = 0.5


class UserPython(NamedTuple):
    """What settings say of a Python for some of the user's code."""

    requirements: tuple[str, ...]
    python: str | None
    settings: str = "run.environment_"
    """Begin of the names of both settings."""

    @classmethod
    def of_environment(cls, run: RunSettings) -> UserPython:
        """Return what the settings of a run say of its environment."""
        return cls(run.environment_requirements, run.environment_python)

    @classmethod
    def of_agents(cls, agents: AgentSettings) -> UserPython:
        """Return what the settings of agents say of their command."""
        return cls(agents.requirements, agents.python, "agents.")


def command_words(agents: AgentSettings, python: Path | None = None) -> tuple[str, ...]:
    """Return the words of `agents.command`, with the files that they name absolute; none = unset.

    Args:
        agents: Settings of agents.
        python: Python that the command's `python` is then; None = as the words say.

    Raises:
        SettingsError: It cannot be split into words.
    """
    command = agents.command or ()
    if isinstance(command, str):
        try:
            command = tuple(shlex.split(command))
        except ValueError as error:
            raise SettingsError(
                f"agents.command must be words as a shell takes them, got {command!r}: {error}; "
                "close the quotation, or write a list"
            ) from None
    if python is not None and command[:1] in {("python",), ("python3",)}:
        command = (str(python), *command[1:])
    return tuple(map(_absolute, command))


def _absolute(word: str) -> str:
    """Return the path of a file that a word names, as the command runs elsewhere."""
    if "/" in word or "." in word:
        for folder in (*looked_in, Path.cwd()):
            with suppress(OSError, ValueError):  # no name of a file
                if (path := folder / word).is_file():
                    return str(path.absolute())
    return word


def requirements_of(wanted: UserPython) -> list[Requirement]:
    """Read the required packages.

    Raises:
        SettingsError: A requirement is not written as pip takes it.
    """
    requirements = []
    for text in wanted.requirements:
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement as error:
            raise SettingsError(
                f"{wanted.settings}requirements must be packages as pip takes them, got {text!r} "
                f"({str(error).partition(chr(10))[0]}); write it as in textarena>=0.7"
            ) from None
    return requirements


def installed_python(wanted: UserPython) -> Path | None:
    """Return the Python of the user's code, installed if need be; None = that of this process.

    To install takes up to half an hour a command, and waits as long for another process that
    installs the same. An unfinished installation is deleted and begun again.

    Raises:
        SettingsError: The Python does not exist, or uv cannot make one.
    """
    if wanted.python is not None:
        python = Path(wanted.python).expanduser().absolute()
        if not python.is_file():
            raise SettingsError(
                f"{wanted.settings}python must be the Python of a virtual environment, got "
                f"{wanted.python} ({missing(wanted.python)}); make one with `python -m venv`, and "
                "name its bin/python"
            )
        return python
    if not wanted.requirements:
        return None
    return _installed_by_uv(sorted(map(str, requirements_of(wanted))), wanted.settings)


def _installed_by_uv(requirements: Sequence[str], settings: str) -> Path:
    key = json.dumps([list(requirements), sys.version_info[:2]])
    kept = Path.home() / ".cache" / "nyala" / "environments"
    folder = kept / hashlib.sha256(key.encode()).hexdigest()[:16]
    python, is_complete = folder / "bin" / "python", folder / "complete"
    if is_complete.exists():
        return python
    uv = _uv(settings)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not is_complete.exists():
                log.info("uv installs packages of the user's code", folder=str(folder))
                shutil.rmtree(folder, ignore_errors=True)
                _run(settings, uv, "venv", "--python", sys.executable, str(folder))
                _run(settings, uv, "pip", "install", "--python", str(python), *requirements)
                is_complete.touch()
    except OSError as error:
        raise SettingsError(
            f"{settings}requirements must be installed in a folder that can be written, got "
            f"{kept}: {error.strerror}; make it writable, or set {settings}python"
        ) from None
    return python


def _uv(settings: str) -> str:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise SettingsError(
            f"{settings}requirements must be installed by uv, got none on this machine; run "
            f"`pip install uv`, or make a virtual environment and set {settings}python"
        )
    return uv


def _run(settings: str, *command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()[-800:]
    except subprocess.TimeoutExpired:
        reason = f"no end within {INSTALL_S:g} s"
    else:
        return
    raise SettingsError(
        f"{settings}requirements must be packages that uv can install, got: {reason}; change what "
        f"uv refuses, or set {settings}python to a Python that has the packages"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock, because several actors of a machine start at the same time."""
    ends_at = time.monotonic() + INSTALL_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_at:
                    raise SettingsError(
                        f"{path} must be unlocked, got a lock that another process has held for "
                        f"{INSTALL_S:g} s; end that process"
                    ) from None
                time.sleep(POLL_S)
        yield
