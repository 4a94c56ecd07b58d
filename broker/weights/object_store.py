"""Versions of weights as objects in a folder or a bucket, for actors that are far from the learner.

One object each, of the version's wire bytes, under a name with its digest: never overwritten, and
announced to actors when it is whole. Readers check the bytes.
"""

from __future__ import annotations

import re
from typing import IO

from broker.protocol.manifest import WeightManifest
from buffer.record.episode import PolicyVersion
from buffer.record.filesystems import filesystem_at

KEPT = 3
"""Versions that stay: a reader of the last but one has time to finish."""
_NAME = re.compile(r"(\d+)-(\d+)-[0-9a-f]{64}")


class WeightStore:
    """The objects of one run, as the weight publisher sees them; actors see `StoredWeights`.

    Args:
        url: As fsspec writes it.
        run: Name of the run.

    Raises:
        SettingsError: The URL is of no known kind.
    """

    def __init__(self, url: str, run: str) -> None:
        self._files, root = filesystem_at(url, setting="learner.weight_store")
        self._root = f"{root.rstrip('/')}/{run}/weights"

    def url_of(self, manifest: WeightManifest) -> str:
        """Return the URL of a version, stored or not."""
        return str(self._files.unstrip_protocol(self._path(manifest)))

    def has(self, manifest: WeightManifest) -> bool:
        """Return whether the version is there as a whole."""
        path = self._path(manifest)
        return bool(self._files.exists(path) and self._files.size(path) == manifest.num_bytes)

    def create(self, manifest: WeightManifest) -> IO[bytes]:
        """Open a new object; blocks, as every call of it does."""
        self._files.makedirs(self._root, exist_ok=True)
        opened: IO[bytes] = self._files.open(self._path(manifest), "wb")
        return opened

    def forget_old(self) -> int:
        """Remove all but the newest versions; returns how many."""
        self._files.invalidate_cache()
        found: dict[str, PolicyVersion] = {}
        for path in self._files.find(self._root):
            if name := _NAME.fullmatch(path.rpartition("/")[2]):
                found[path] = PolicyVersion(int(name[1]), int(name[2]))
        old = sorted(found, key=found.__getitem__)[:-KEPT]
        if old:
            self._files.rm(old)
        return len(old)

    def _path(self, manifest: WeightManifest) -> str:
        lineage, step = manifest.version
        return f"{self._root}/{lineage}-{step}-{manifest.digest}"


class StoredWeights:
    """One version in the store. Consumer: an actor, which has its URL from the publisher.

    Raises:
        SettingsError: The URL is of no kind known here.
    """

    def __init__(self, url: str) -> None:
        self._files, self._path = filesystem_at(url, setting="the URL of stored weights")

    def read(self, start: int, stop: int) -> bytes:
        """Read a slice.

        Raises:
            OSError: It is not there, or the store does not answer.
        """
        return bytes(self._files.cat_file(self._path, start=start, end=stop))
