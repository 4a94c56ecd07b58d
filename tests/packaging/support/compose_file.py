"""compose.yaml as the tests read it: variables take their defaults."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
PATH = ROOT / "compose.yaml"


def load_compose(**variables: str) -> dict[str, Any]:
    """Read compose.yaml with `${NAME:-default}` filled in."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["name"], match["default"])

    text = re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", value, PATH.read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def mounts_of(service: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what a service has mounted: where it finds it -> (volume or folder, mode)."""
    mounts = {}
    for mount in service.get("volumes", []):
        source, target, mode = (*mount.split(":"), "rw")[:3]
        mounts[target] = source, mode
    return mounts
