"""Registered keys: pairs that actors made at their start, allowed through an enrolment key.

    allowed/enrolment/fleet.pub                        an enrolment key that replicas share
    allowed/actor/fleet/fleet-1f0c9a72b3d45e60.pub     the key of one of them

A name is the digest of its key: nothing that a peer says becomes a path. The time of a file is when
its actor was last heard; a key that nobody has used for `UNUSED_S` is removed, and one that has
been silent for `SILENT_S` makes room when there are too many.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from configs.errors import SettingsError

from .allow_list import AllowList, Member, enrolled_folder
from .keys import is_key

UNUSED_S = 900.0  # longer than an actor waits for a broker before it gives up (ten minutes)
SILENT_S = 60.0  # many heartbeats
TOUCH_S = 20.0  # the time of a file is at most this old while its actor lives
MAX_STEM = 47  # of the enrolment key's name, so that the whole is the name of a key


class EnrolledKeys:
    """Registers keys in one folder and removes unused ones.

    Args:
        folder: Of the run's keys.
        allowed: The allow-list of the same folder.
        max_keys: Keys that one enrolment key may have at a time.
        clock: Time of day, as files have it, seconds.
        steady: Time that never jumps, seconds: a key is silent while this process sees that its
            file keeps its time.
    """

    def __init__(
        self,
        folder: Path,
        allowed: AllowList,
        *,
        max_keys: int,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._allowed = allowed
        self._max_keys = max_keys
        self._clock = clock
        self._steady = steady
        self._seen: dict[Path, tuple[float | None, float]] = {}
        """Files, their times, and since when each has had its time, by the steady clock. One whose
        time cannot be read, however long, is not silent."""

    def register(self, public: bytes, enrolment: str) -> str | None:
        """Allow a key as an actor's; the second time does nothing.

        Returns:
            Its name; None if this enrolment key has as many as it may.

        Raises:
            SettingsError: it is no key, is allowed already, or the folder cannot be written.
        """
        if not is_key(public):
            raise SettingsError(f"a key to enrol must be z85 of 40 characters, got {public!r:.80}")
        self._allowed.refresh()
        known = self._allowed.member(public)
        if known is not None and known.enrolled_by != enrolment:
            raise SettingsError("a key to enrol must be new, got one that is on the list already")
        name = f"{enrolment[:MAX_STEM]}-{hashlib.blake2b(public, digest_size=8).hexdigest()}"
        if known is None and not self._place(public, enrolment, name):
            return None
        self._allowed.refresh()
        member = self._allowed.member(public)
        if member is None:  # under two roles, of which one is in a file that was not read
            raise SettingsError("a key to enrol must be new, got one that lies under another role")
        return member.name

    def mark_seen(self, keys: Iterable[str]) -> None:
        """Note that the actors of these public keys are alive."""
        now = self._clock()
        for key in keys:
            member = self._allowed.member(key.encode())
            if member is not None and member.enrolled_by is not None:
                path = path_of(self._folder, member)
                at = last_seen(path)
                if at is None or abs(now - at) > TOUCH_S:
                    with suppress(OSError):  # it was revoked meanwhile
                        os.utime(path, (now, now))

    def forget_unused(self) -> list[str]:
        """Remove keys that nobody has used for long; returns their names."""
        unused = [path for path, silent_s in self._silences().items() if silent_s > UNUSED_S]
        with suppress(OSError):  # where the folder cannot be written they stay
            for path in unused:
                path.unlink(missing_ok=True)
        return [path.stem for path in unused if not path.exists()]

    def _place(self, public: bytes, enrolment: str, name: str) -> bool:
        place = enrolled_folder(self._folder, enrolment)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(place):
                return False
            new = place / f".{secrets.token_hex(4)}"
            new.write_bytes(public + b"\n")
            new.replace(place / f"{name}.pub")  # whole, or not there
        except OSError as error:
            raise SettingsError(
                f"{place} must be a folder that the broker can write, got {error.strerror}; "
                "keys that actors register are kept there"
            ) from None
        return True

    def _make_room(self, place: Path) -> bool:
        silences = {p: s for p, s in self._silences().items() if p.parent == place}
        files = sorted(silences, key=silences.__getitem__, reverse=True)
        while len(files) >= self._max_keys:
            if silences[files[0]] < SILENT_S:
                return False
            files.pop(0).unlink(missing_ok=True)
        return True

    def _silences(self) -> dict[Path, float]:
        """Return for how long each key has not been heard of, as far as this process knows."""
        now, before = self._steady(), self._seen
        self._seen = {}
        for path in enrolled_folder(self._folder).glob("*/*.pub"):
            at = last_seen(path)
            known = before.get(path)
            is_same = known is not None and known[0] == at is not None
            self._seen[path] = known if known is not None and is_same else (at, now)
        return {path: now - since for path, (_, since) in self._seen.items()}


def path_of(folder: Path, member: Member) -> Path:
    """Return the file of a registered key."""
    assert member.enrolled_by is not None
    return enrolled_folder(folder, member.enrolled_by) / f"{member.name}.pub"


def last_seen(path: Path) -> float | None:
    """Return when the actor of a registered key was last heard, time of day; None = unknown."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
