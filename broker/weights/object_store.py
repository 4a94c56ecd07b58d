"""Weights as objects in a folder or a bucket, for actors that are far from the learner.

    1-7-DIGEST                  all bytes of version (1, 7)
    1-7-DIGEST-from-DIGEST      a sparse update to it, or its adapter: from the bytes of that digest
    base-DIGEST                 what adapters are added to

Never overwritten, and announced to actors when they are whole. Readers check the bytes.
"""

from __future__ import annotations

import re
from typing import IO

from buffer.record.episode import PolicyVersion
from buffer.record.filesystems import filesystem_at

KEPT = 3
"""Versions that stay: a reader of the last but one has time to finish."""
_VERSION = re.compile(r"(\d+)-(\d+)-[0-9a-f]{64}")
_UPDATE = re.compile(_VERSION.pattern + r"-from-[0-9a-f]{64}")


def version_name(version: PolicyVersion, digest: str) -> str:
    """Return the name of all bytes of a version."""
    return f"{version.lineage}-{version.step}-{digest}"


def update_name(version: PolicyVersion, digest: str, base_digest: str) -> str:
    """Return the name of what turns the bytes of a base into those of a version."""
    return f"{version_name(version, digest)}-from-{base_digest}"


def base_name(digest: str) -> str:
    """Return the name of what adapters are added to."""
    return f"base-{digest}"


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

    def url_of(self, name: str) -> str:
        """Return the URL of an object, stored or not."""
        return str(self._files.unstrip_protocol(self._path(name)))

    def has(self, name: str, num_bytes: int) -> bool:
        """Return whether an object is there as a whole."""
        path = self._path(name)
        return bool(self._files.exists(path) and self._files.size(path) == num_bytes)

    def create(self, name: str) -> IO[bytes]:
        """Open a new object; blocks, as every call of it does."""
        self._files.makedirs(self._root, exist_ok=True)
        opened: IO[bytes] = self._files.open(self._path(name), "wb")
        return opened

    def forget_versions(self) -> list[str]:
        """Remove all bytes of all but the newest versions; returns their names."""
        return self._forget(_VERSION, KEPT)

    def forget_updates(self, kept: int) -> list[str]:
        """Remove all but the newest `kept` updates; returns their names."""
        return self._forget(_UPDATE, kept)

    def _forget(self, names: re.Pattern[str], kept: int) -> list[str]:
        self._files.invalidate_cache()
        found: dict[str, PolicyVersion] = {}
        for path in self._files.find(self._root):
            name = path.rpartition("/")[2]
            if parts := names.fullmatch(name):
                found[name] = PolicyVersion(int(parts[1]), int(parts[2]))
        newest_first = sorted(found, key=found.__getitem__, reverse=True)
        old = newest_first[kept:]
        if old:
            self._files.rm([self._path(name) for name in old])
        return old

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class StoredWeights:
    """One object in the store. Consumer: an actor, which has its URL from the publisher.

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
