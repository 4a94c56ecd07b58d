"""The Python of an environment host: one of the user's, or an environment that uv makes once.

Virtual environments are kept under `~/.cache/nyala/environments`, by their requirements and the
version of Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
from packaging.requirements import InvalidRequirement, Requirement

from configs.errors import SettingsError
from configs.settings import RunSettings
from configs.user_code import missing

log = structlog.get_logger()

INSTALL_S = 1800.0  # some packages bring gigabytes along
POLL_S = 0.5
SETTING = "run.environment_requirements"


def requirements_of(run: RunSettings) -> list[Requirement]:
    """Read the required packages of a run.

    Raises:
        SettingsError: A requirement is not written as pip takes it.
    """
    requirements = []
    for text in run.environment_requirements:
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement as error:
            raise SettingsError(
                f"{SETTING} must be packages as pip takes them, got {text!r} "
                f"({str(error).partition(chr(10))[0]}); write it as in textarena>=0.7"
            ) from None
    return requirements


def host_python(run: RunSettings) -> Path | None:
    """Return the Python of a run's environment, installed if need be; None = the actor's own.

    To install takes up to half an hour a command, and waits as long for another process that
    installs the same. An unfinished installation is deleted and begun again.

    Raises:
        SettingsError: The Python does not exist, or uv cannot make one.
    """
    if run.environment_python is not None:
        python = Path(run.environment_python).expanduser().absolute()
        if not python.is_file():
            raise SettingsError(
                f"run.environment_python must be the Python of a virtual environment, got "
                f"{run.environment_python} ({missing(run.environment_python)}); make one with "
                "`python -m venv`, and name its bin/python"
            )
        return python
    if not run.environment_requirements:
        return None
    return _installed_python(sorted(map(str, requirements_of(run))))


def _installed_python(requirements: Sequence[str]) -> Path:
    key = json.dumps([list(requirements), sys.version_info[:2]])
    kept = Path.home() / ".cache" / "nyala" / "environments"
    folder = kept / hashlib.sha256(key.encode()).hexdigest()[:16]
    python, is_complete = folder / "bin" / "python", folder / "complete"
    if is_complete.exists():
        return python
    uv = _uv()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not is_complete.exists():
                log.info("uv installs packages of the environment", folder=str(folder))
                shutil.rmtree(folder, ignore_errors=True)
                _run(uv, "venv", "--python", sys.executable, str(folder))
                _run(uv, "pip", "install", "--python", str(python), *requirements)
                is_complete.touch()
    except OSError as error:
        raise SettingsError(
            f"{SETTING} must be installed in a folder that can be written, got {kept}: "
            f"{error.strerror}; make it writable, or set run.environment_python"
        ) from None
    return python


def _uv() -> str:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise SettingsError(
            f"{SETTING} must be installed by uv, got none on this machine; run `pip install "
            f"uv`, or make a virtual environment and name its Python as run.environment_python"
        )
    return uv


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()[-800:]
    except subprocess.TimeoutExpired:
        reason = f"no end within {INSTALL_S:g} s"
    else:
        return
    raise SettingsError(
        f"{SETTING} must be packages that uv can install, got: {reason}; change what uv refuses, "
        "or set run.environment_python to a Python that has the packages"
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
