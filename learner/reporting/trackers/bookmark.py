"""Bookmarks: the last steps that a tracker has, in a file of the run's folder, for a resume."""

from __future__ import annotations

from pathlib import Path

import msgspec

from configs import durable

FOLDER = "trackers"


class Bookmark(msgspec.Struct):
    """What a tracker has got."""

    run_id: str | None = None
    """The tracker's own id of the run; None = it has none yet."""
    sent: dict[str, int] = {}
    """`batches`, `evaluations`, `samples/train` or `samples/eval` -> last step."""
    has_model: bool = False
    """Whether it has the finished model."""


def read_bookmark(run_folder: Path, name: str) -> Bookmark:
    """Read how far the tracker of this name is; at the beginning where that cannot be read."""
    try:
        return msgspec.json.decode(_path(run_folder, name).read_bytes(), type=Bookmark)
    except (OSError, msgspec.DecodeError):
        return Bookmark()


def write_bookmark(run_folder: Path, name: str, bookmark: Bookmark) -> None:
    """Write how far it is."""
    durable.replace_file(_path(run_folder, name), msgspec.json.encode(bookmark))


def _path(run_folder: Path, name: str) -> Path:
    return run_folder / FOLDER / f"{name}.json"
