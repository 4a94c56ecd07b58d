"""compose.yaml as the tests read it: variables take their defaults."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
PATH = ROOT / "compose.yaml"
STORE_SECRETS = {"redis.url", "redis_auth.conf"}


def load_compose(**variables: str) -> dict[str, Any]:
    """Read compose.yaml with `${NAME:-default}` filled in."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["name"], match["default"])

    text = re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", value, PATH.read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def secrets_of(service: dict[str, Any]) -> dict[str, str]:
    """Name the secrets of a service and where it finds them."""
    mounts = [
        {"source": secret, "target": f"/run/secrets/{secret}"}
        if isinstance(secret, str)
        else secret
        for secret in service.get("secrets", [])
    ]
    return {mount["source"]: mount["target"] for mount in mounts}
