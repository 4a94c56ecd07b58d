"""Allow-list: public keys in `allowed/` and their roles, read again on change, added and revoked.

    allowed/*.pub             actors: lease, beat, submit
    allowed/actor/*.pub       the same
    allowed/enrolment/*.pub   may register keys of actors, and nothing else
    allowed/actor/NAME/*.pub  keys that were registered with the enrolment key NAME (`enrolled.py`)
    allowed/host/*.pub        hosts of live agents: take conversations, call, hear, end
    allowed/observer/*.pub    may read the status, and change nothing
    allowed/operator/*.pub    may read the status, revoke keys and drain actors; no episodes

The broker, the publisher and actors that share weights read it; `nyala keys` changes it.

Fails closed: a file that cannot be read allows no key, a folder of another name is ignored, a
folder that cannot be read is empty, and a key under two roles has none. A registered key counts
only while its enrolment key is allowed, under no other role. Where connections of strangers have
taken all files that this process may open, the list stays as it was read last.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from configs import durable
from configs.errors import SettingsError, quoted

from .keys import (
    ALLOWED,
    NAME,
    NO_FILE_LEFT,
    SERVERS,
    forget_name,
    make_pair,
    place_public,
    read_key,
)

TAG = 12  # characters of a public key that name it: 75 bits, which no other key shares


class Role(StrEnum):
    """Role of a key's holder; the broker's `validation.py` lists the requests of each role."""

    ACTOR = "actor"
    ENROLMENT = "enrolment"
    HOST = "host"
    OBSERVER = "observer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class AllowListEntry:
    """A line of the allow-list."""

    name: str
    """Name of the key's file."""
    role: Role
    tag: str
    """Tag of its key in the store and in budgets: `own`, or `enrolment~own` for a registered key,
    so that all keys of one enrolment are one holder."""
    enrolled_by: str | None = None
    """The enrolment key that registered it; None = a person allowed it."""


class AllowList:
    """The keys in `allowed/`, read again when a folder or a file in it has changed.

    Args:
        folder: Folder with `allowed/`; None = only keys of `admit_actors` are allowed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen: object = None
        self._members: dict[bytes, AllowListEntry] = {}

    def member(self, public_key: bytes) -> AllowListEntry | None:
        """Return the entry of a key, or None."""
        return self._members.get(public_key)

    def role(self, public_key: bytes) -> Role | None:
        """Return the role of a key, or None."""
        member = self._members.get(public_key)
        return None if member is None else member.role

    def members(self) -> dict[bytes, AllowListEntry]:
        """Return the allowed keys with their entries; a changed list is a new dictionary."""
        return self._members

    def admit_actors(self, keys: Iterable[str]) -> None:
        """Allow these keys (z85), as actors, and no others; only for a list without a folder."""
        assert self._folder is None, self._folder
        named = {key[:TAG]: key.encode() for key in keys}
        self._members = {key: AllowListEntry(tag, Role.ACTOR, tag) for tag, key in named.items()}

    def refresh(self) -> None:
        """Read the list if it has changed; costs one `stat` a file. Any thread may call it.

        Raises:
            OSError: This process can open no more files; the list stays as it is.
        """
        if self._folder is None:
            return
        seen = _signature(self._folder)
        if seen != self._seen:
            # A file that changes while it is read is read again next time: its signature differs.
            self._members, self._seen = read_allowed(self._folder), seen


def read_allowed(folder: Path) -> dict[bytes, AllowListEntry]:
    """Read the allowed keys, without those under two roles and those in malformed files.

    Raises:
        OSError: This process can open no more files.
    """
    members: dict[bytes, AllowListEntry] = {}
    ambiguous: set[bytes] = set()
    enrolments: dict[str | None, bytes] = {}
    for entry, path in _entries(folder):
        try:
            key = read_key(path)
        except SettingsError:
            continue
        tag = key.decode()[:TAG]
        if entry.role is Role.ENROLMENT:
            enrolments[entry.name] = key
        if entry.enrolled_by is not None:
            if entry.enrolled_by not in enrolments:
                continue
            tag = f"{enrolments[entry.enrolled_by].decode()[:TAG]}~{tag}"
        member = replace(entry, tag=tag)
        if members.setdefault(key, member).role is not member.role:
            ambiguous.add(key)
    return {
        key: member
        for key, member in members.items()
        if ambiguous.isdisjoint({key, enrolments.get(member.enrolled_by)})
    }


def add(folder: Path, name: str, role: Role) -> Path:
    """Make the key pair of one more client and allow it; return the file of its secret key.

    A pair of this name that is in the folder but not allowed is used again. With a new enrolment
    key, keys that an earlier one of this name registered are deleted.

    Raises:
        SettingsError: The name is taken or cannot be one, the pair in the folder cannot be used, or
            the folder cannot be written.
    """
    _check_name(name)
    if any(member.name == name for member, _ in _entries(folder)):
        raise SettingsError(
            f"the name of a new key must be free, got {name}, which is allowed already; "
            "choose another, or revoke it first"
        )
    try:
        if role is Role.ENROLMENT:  # drop keys that an earlier key of this name registered
            shutil.rmtree(enrolled_folder(folder, name), ignore_errors=True)
        allowed = folder / ALLOWED / role / f"{name}.pub"
        place_public(allowed, make_pair(folder, name, allowed=allowed).public)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / f"{name}.key"


def revoke(folder: Path, name: str) -> list[Role]:
    """Take a key off the list, whatever its roles, and return these.

    Every broker with this folder refuses it within a second. The pair of this name in the folder is
    deleted, and so are the keys that an enrolment key of this name registered.

    Raises:
        SettingsError: The name cannot be one, no key of this name is allowed, or the folder cannot
            be written.
    """
    _check_name(name)
    entries = _entries(folder)
    held = [member.role for member, _ in entries if member.name == name]
    if not held:
        names = ", ".join(sorted({member.name for member, _ in entries})) or "none"
        raise SettingsError(
            f"the key to revoke must be in {folder / ALLOWED}, got {name}; choose one of the names "
            f"there: {names}"
        )
    try:
        for member, path in entries:
            if name in {member.name, member.enrolled_by}:
                path.unlink(missing_ok=True)
                durable.DISK.sync(path.parent)  # or it may be back after a power loss
        forget_name(folder, name)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return held


def enrolled_folder(folder: Path, enrolment: str = "") -> Path:
    """Return the folder of keys that this enrolment key registered, or that of all of them."""
    return folder / ALLOWED / Role.ACTOR / enrolment


def _entries(folder: Path) -> list[tuple[AllowListEntry, Path]]:
    """List the files of keys with their entries, which have no tags yet."""
    folders = [(Role.ACTOR, folder / ALLOWED), *((role, folder / ALLOWED / role) for role in Role)]
    entries = [
        (AllowListEntry(path.stem, role, tag=""), path)
        for role, place in folders
        for path in _public_keys(place)
    ]
    enrolments = [member.name for member, _ in entries if member.role is Role.ENROLMENT]
    return entries + [
        (AllowListEntry(path.stem, Role.ACTOR, tag="", enrolled_by=name), path)
        for name in enrolments
        for path in _public_keys(enrolled_folder(folder, name))
    ]


def _public_keys(folder: Path) -> list[Path]:
    """List a folder; Python 3.13's `glob` shows a folder that it cannot open as empty."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(".pub"))
    except OSError as error:
        if error.errno in NO_FILE_LEFT:
            raise
        return []


def _signature(folder: Path) -> object:
    try:
        # A registered key's file is written once; its time is that of its holder's last message.
        return [
            path if member.enrolled_by else (path, _identity(path))
            for member, path in _entries(folder)
        ]
    except OSError as error:
        if error.errno in NO_FILE_LEFT:
            raise
        return object()  # a file was removed meanwhile, so the list has changed


def _identity(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _check_name(name: str) -> None:
    if name.partition(".")[0] in SERVERS:
        raise SettingsError(
            f"the name of a client's key must not be a server's, got {name}; choose another"
        )
    if NAME.fullmatch(name) is None:
        raise SettingsError(
            "the name of a key must be at most 64 letters, digits, dots, dashes and underscores, "
            f"and begin with a letter or digit, got {quoted(name)}; choose another"
        )


def _unwritable(folder: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"{folder} must be a folder that this process can write, got {error.strerror}; mend that, "
        "or change the original if this is a read-only copy, such as a mounted Secret"
    )
