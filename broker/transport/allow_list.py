"""Allow-list: public keys in `allowed/` and their roles, followed while the process runs.

    allowed/*.pub            actors: lease, beat, submit
    allowed/actor/*.pub      the same
    allowed/observer/*.pub   may read the status, and change nothing
    allowed/operator/*.pub   may read the status, revoke keys and drain actors; no episodes

Fails closed: a file that cannot be read allows no key, a folder of another name is ignored, a
folder that cannot be read is empty, and a key that lies under two roles has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from configs.errors import SettingsError

from .keys import ALLOWED, NAME, SERVERS, forget_name, make_pair, place_public, read_key


class Role(StrEnum):
    """Role of a key's holder; the broker's `permissions.py` lists what each may send."""

    ACTOR = "actor"
    OBSERVER = "observer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Member:
    """A line of the allow-list."""

    name: str
    """Name of the key's file."""
    role: Role


class AllowList:
    """The keys in `allowed/`, read again when a folder or a file in it has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: object = None
        self._members: dict[bytes, Member] = {}

    def member(self, public_key: bytes) -> Member | None:
        """Return the entry of a key, or None."""
        return self._members.get(public_key)

    def role(self, public_key: bytes) -> Role | None:
        """Return the role of a key, or None."""
        member = self._members.get(public_key)
        return None if member is None else member.role

    def members(self) -> dict[bytes, Member]:
        """Return the allowed keys; a change makes a new dictionary."""
        return self._members

    def refresh(self) -> None:
        """Read the list if it has changed; costs one `stat` a file. Any thread may call it."""
        seen = _signature(self._folder)
        if seen != self._seen:
            # A file that changes while it is read is read again next time: its signature differs.
            self._members, self._seen = read_allowed(self._folder), seen


def read_allowed(folder: Path) -> dict[bytes, Member]:
    """Read the allowed keys, without those under two roles and those in malformed files."""
    found: dict[bytes, Member] = {}
    ambiguous: set[bytes] = set()
    for role, path in _files(folder):
        try:
            key = read_key(path)
        except SettingsError:
            continue
        if found.setdefault(key, Member(path.stem, role)).role is not role:
            ambiguous.add(key)
    return {key: member for key, member in found.items() if key not in ambiguous}


def add(folder: Path, name: str, role: Role) -> Path:
    """Make the key pair of one more client and allow it; returns its secret key's file.

    Raises:
        SettingsError: the name is taken or cannot be a file's, or the folder cannot be written.
    """
    _check(name)
    if any(path.stem == name for _, path in _files(folder)):
        raise SettingsError(
            f"the name of a new key must be free, got {name}, which is allowed already; "
            "choose another, or revoke it first"
        )
    try:
        pair = make_pair(folder, name)
        place_public(folder / ALLOWED / role / f"{name}.pub", pair.public)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / f"{name}.key"


def revoke(folder: Path, name: str) -> list[Role]:
    """Take a key off the list, in whatever role; every broker refuses it within a second.

    Raises:
        SettingsError: no key of this name is allowed, or the folder cannot be written.
    """
    _check(name)
    held = [(role, path) for role, path in _files(folder) if path.stem == name]
    if not held:
        known = ", ".join(sorted({path.stem for _, path in _files(folder)})) or "nobody"
        raise SettingsError(
            f"the key to revoke must be in {folder / ALLOWED}, got {name}; allowed are: {known}"
        )
    try:
        for _, path in held:
            path.unlink(missing_ok=True)
        forget_name(folder, name)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return [role for role, _ in held]


def _files(folder: Path) -> list[tuple[Role, Path]]:
    folders = [(Role.ACTOR, folder / ALLOWED), *((role, folder / ALLOWED / role) for role in Role)]
    return [(role, path) for role, place in folders for path in sorted(place.glob("*.pub"))]


def _signature(folder: Path) -> object:
    try:
        stats = [(role, path, path.stat()) for role, path in _files(folder)]
    except OSError:  # a file was removed meanwhile: what is left is another list
        return object()
    return [(role, path, s.st_mtime_ns, s.st_size, s.st_ino) for role, path, s in stats]


def _check(name: str) -> None:
    if name.partition(".")[0] in SERVERS:
        raise SettingsError(
            f"the name of a client's key must not be a server's, got {name}; choose another"
        )
    if NAME.fullmatch(name) is None:
        raise SettingsError(
            f"the name of a key must be letters, digits, dots, dashes and underscores, at most 64, "
            f"got {name!r:.80}; it becomes the name of a file"
        )


def _unwritable(folder: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"{folder} must be a folder this process can write, got {error.strerror}; "
        "change it where it is kept, and mount or copy it anew"
    )
