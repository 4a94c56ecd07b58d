"""Check the keys of a run: complete, and open to nobody else."""

from __future__ import annotations

from pathlib import Path

from broker.transport.keys import SERVERS, check_private, load_pair
from configs.settings import BrokerSettings


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
