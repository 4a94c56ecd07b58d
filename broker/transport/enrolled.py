"""Keys registered by actors that share an enrolment key; rotation of the keys of a run.

    allowed/enrolment/fleet.pub                        an enrolment key that replicas share
    allowed/actor/fleet/fleet-1f0c9a72b3d45e60.pub     the key of one of them

A name is the digest of its key: no text of a peer becomes a path. The time of a file is that of its
actor's last message. A key that was unused for `UNUSED_S` is removed, and a key that was silent for
`SILENT_S` is removed when there are too many.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from configs import durable
from configs.errors import SettingsError, quoted

from .allow_list import AllowList, AllowListEntry, Role, enrolled_folder
from .keys import ALLOWED, is_key, load_pair, load_public, make_pair, place_public, read_key

UNUSED_S = 900.0  # longer than an actor waits for a broker before it gives up (ten minutes)
SILENT_S = 60.0  # many heartbeats
TOUCH_S = 20.0  # the time of a file is at most this old while its actor lives
MAX_STEM = 47  # of the enrolment key's name, so that the whole name is not too long


class EnrolledKeys:
    """Registers keys in one folder and removes unused ones.

    Args:
        folder: Folder of the run's keys.
        allowed: The allow-list of the same folder.
        max_keys: Keys that one enrolment key may have at a time.
        clock: Time of day, as files have it, seconds.
        steady: Time that never jumps, seconds: a key is silent while the time of its file stays.
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
        """Time of each file, and since when it has had this time, by the steady clock. A file whose
        time cannot be read is never silent."""

    def register(self, public: bytes, enrolment: str) -> str | None:
        """Allow a key as an actor's; the second time does nothing.

        If this enrolment key has `max_keys` already, the one that was silent longest is deleted,
        provided that it was for `SILENT_S`.

        Returns:
            Name of the key; None if this enrolment key has `max_keys`, and all are in use.

        Raises:
            SettingsError: It is no key, is allowed already, or the folder cannot be written.
        """
        if not is_key(public):
            raise SettingsError(
                f"a key to enrol must be z85 of 40 characters, got {quoted(public)}; use the same "
                "release of Nyala on all machines"
            )
        self._allowed.refresh()
        present = self._allowed.member(public)
        if present is not None and present.enrolled_by != enrolment:
            raise SettingsError(
                "a key to enrol must be new, got one that is allowed already; start this actor "
                "again, so that it makes another"
            )
        name = f"{enrolment[:MAX_STEM]}-{hashlib.blake2b(public, digest_size=8).hexdigest()}"
        if present is None and not self._write_key(public, enrolment, name):
            return None
        self._allowed.refresh()
        member = self._allowed.member(public)
        if member is None:  # under two roles, of which one is in a file that was not read
            raise SettingsError(
                "a key to enrol must be new, got one of another role; start this actor again, so "
                "that it makes another"
            )
        return member.name

    def mark_seen(self, keys: Iterable[str]) -> None:
        """Note that the actors of these public keys are alive; keys of other kinds are ignored."""
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
        """Delete the files of keys that were unused for `UNUSED_S`; return their names."""
        unused = [path for path, silent_s in self._silences().items() if silent_s > UNUSED_S]
        with suppress(OSError):  # where the folder cannot be written they stay
            for path in unused:
                path.unlink(missing_ok=True)
        return [path.stem for path in unused if not path.exists()]

    def _write_key(self, public: bytes, enrolment: str, name: str) -> bool:
        """Write the file of a new key; False if there is no room for it."""
        place = enrolled_folder(self._folder, enrolment)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(place):
                return False
            new = place / f".{secrets.token_hex(4)}"
            new.write_bytes(public + b"\n")
            new.replace(place / f"{name}.pub")  # atomic
        except OSError as error:
            raise SettingsError(
                f"{place}, which keeps the keys that actors register, must be a folder that the "
                f"broker can write, got {error.strerror}; mend that"
            ) from None
        return True

    def _make_room(self, place: Path) -> bool:
        """Remove the keys that were silent longest; False if all that are left are in use."""
        silences = {p: s for p, s in self._silences().items() if p.parent == place}
        files = sorted(silences, key=silences.__getitem__, reverse=True)
        while len(files) >= self._max_keys:
            if silences[files[0]] < SILENT_S:
                return False
            files.pop(0).unlink(missing_ok=True)
        return True

    def _silences(self) -> dict[Path, float]:
        """Return the silence of each key, as far as this process knows."""
        now, before = self._steady(), self._seen
        self._seen = {}
        for path in enrolled_folder(self._folder).glob("*/*.pub"):
            at = last_seen(path)
            earlier = before.get(path)
            is_same = earlier is not None and earlier[0] == at is not None
            self._seen[path] = earlier if earlier is not None and is_same else (at, now)
        return {path: now - since for path, (_, since) in self._seen.items()}


def path_of(folder: Path, member: AllowListEntry) -> Path:
    """Return the file of a registered key."""
    assert member.enrolled_by is not None
    return enrolled_folder(folder, member.enrolled_by) / f"{member.name}.pub"


def last_seen(path: Path) -> float | None:
    """Return the time of day of a registered key's last use; None = unknown."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


# --------------------------------------------------------------------------------------------------
# Key rotation while a run goes on: the new key is known before the old one is gone.
#
# An actor's old key stays allowed under another name until it is revoked. An old enrolment key
# stays with all keys that it registered.
#
#     actor.key A, allowed A ──rotate──▶ actor.key B, allowed B and actor.previous A ──revoke──▶ B
#
# The broker's next public key is handed out, then the key is exchanged. A serving broker adopts the
# key by itself; its actors have to connect again, and try both public keys.
#
#     broker.key A ──announce──▶ broker.next.pub B is copied to actors ──rotate──▶ broker.key B

NEXT = "broker.next"
PREVIOUS = "previous"


def announce_broker_key(folder: Path) -> Path:
    """Make the broker's next key, unless one is announced; return its public key's file.

    Actors need this file before the key is used (`rotate_broker_key`).

    Raises:
        SettingsError: The key that is announced already cannot be used.
        OSError: The folder cannot be written.
    """
    make_pair(folder, NEXT)
    return folder / f"{NEXT}.pub"


def rotate_broker_key(folder: Path) -> None:
    """Replace the broker's key by the announced one; a serving broker adopts it by itself.

    Raises:
        SettingsError: No key was announced, or it cannot be used.
        OSError: The folder cannot be written.
    """
    if not (folder / f"{NEXT}.key").exists():
        raise SettingsError(
            f"the broker's next key must be announced before it is used, got no {NEXT}.key; "
            f"make it with `nyala keys announce --in {folder}` and copy {NEXT}.pub to the actors"
        )
    load_pair(folder, NEXT)
    # The public half first: an actor that connects in between has a copy in `broker.next.pub`.
    for suffix in ("pub", "key"):
        durable.move(folder / f"{NEXT}.{suffix}", folder / f"broker.{suffix}")


def rotate_client_key(folder: Path, name: str) -> str:
    """Give an actor, observer, operator or enrolment key a new pair; the old one stays allowed.

    The files of the old pair are replaced, secret included; processes that have read it go on with
    it, as the key `NAME.previous`, until that is revoked.

    The keys that an old enrolment key registered stay with it: their tags, and so their leases,
    are those of the old key, and its revocation revokes them too.

    Returns:
        The name to revoke when every process of the actor has been restarted.

    Raises:
        SettingsError: No key of this name is allowed, or its last rotation is not finished.
        OSError: The folder cannot be written.
    """
    places = [*(folder / ALLOWED).glob(f"{name}.pub"), *(folder / ALLOWED).glob(f"*/{name}.pub")]
    if len(places) != 1:
        raise SettingsError(
            f"the key to rotate must be in {folder / ALLOWED} once, got {len(places)} of {name}; "
            f"choose a name that `nyala keys list --in {folder}` shows once"
        )
    (allowed,) = places
    previous = allowed.with_name(f"{name}.{PREVIOUS}.pub")
    if previous.exists():
        raise SettingsError(
            f"the last rotation must be finished first, got {previous}; when every process with "
            f"the old key has been restarted, run `nyala keys revoke {name}.{PREVIOUS}`"
        )
    if allowed.parent.name == Role.ENROLMENT:
        _keep_registered(folder, allowed, previous)
    durable.move(allowed, previous)
    for suffix in ("key", "pub"):
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    make_pair(folder, name, allowed=allowed)
    return f"{name}.{PREVIOUS}"


def _keep_registered(folder: Path, allowed: Path, previous: Path) -> None:
    """Let the keys that an enrolment key registered stay with it under its next name."""
    registered = enrolled_folder(folder, allowed.stem)
    if registered.exists():
        place_public(previous, read_key(allowed))  # first, so that every key has an enrolment key
        durable.move(registered, enrolled_folder(folder, previous.stem))


def broker_public_keys(folder: Path) -> list[bytes]:
    """Read the keys that a broker of this run may have now: its own, then an announced one.

    Raises:
        SettingsError: The broker's public key is missing or malformed.
    """
    keys = [load_public(folder, "broker")]
    if (folder / f"{NEXT}.pub").exists():
        keys.append(load_public(folder, NEXT))
    return keys
