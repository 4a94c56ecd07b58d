"""Keys of a run with actors that were given theirs by hand."""

from __future__ import annotations

from pathlib import Path

from broker.transport.keys import make_client, make_keys


def keys_with_actor(folder: Path, name: str = "actor") -> Path:
    """Make the keys of a run and one of an actor."""
    make_client(make_keys(folder), name)
    return folder
