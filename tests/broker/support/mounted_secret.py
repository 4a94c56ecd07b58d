"""A Secret as a kubelet mounts it into a container."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path


def mount(folder: Path, files: Sequence[Path], *, owner: int, group: int, mode: int) -> Path:
    """Make what a kubelet makes of a Secret: links to a folder that is exchanged as a whole."""
    contents = folder / "..2026_11_23_17_00_00.1"
    contents.mkdir(parents=True)
    for place in (folder, contents):
        place.chmod(0o755)
    (folder / "..data").symlink_to(contents.name)
    for file in files:
        copy = contents / file.name
        shutil.copy(file, copy)
        os.chown(copy, owner, group)
        copy.chmod(mode)
        (folder / file.name).symlink_to(Path("..data") / file.name)
    return folder
