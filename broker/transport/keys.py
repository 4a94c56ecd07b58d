"""CURVE keys of a run: files in one folder, made by `nyala keys` and read by every process.

    keys/                   0700
      broker.key .pub       the broker's server key
      broker.next.pub       the one that follows it, while it is being exchanged (`enrolled.py`)
      learner.key .pub      the weight publisher's server key
      actor-0.key .pub ...  a key of its own for each actor that `nyala up` starts
      host.key .pub         for hosts of agents on the run's own machine
      enrolment.key .pub    with which other actors register a key of their own (`enrolled.py`)
      allowed/              keys that may connect, and their roles (`allow_list.py`)

A `.key` file has a secret (z85, 40 characters) and must be readable by its owner alone; or, as
container platforms mount secrets, belong to root and be readable by a group of this process. An
actor's machine needs broker.pub, and enrolment.key or a key of its own as actor.key, but no other
secrets: the publisher's public key comes with each publication, through the broker.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from configs import durable
from configs.errors import SettingsError

SERVERS = ("broker", "learner")
"""Keys of the processes that listen."""
ACTOR = "actor"
"""An actor's own key on a machine with one actor."""
ENROLMENT = "enrolment"
"""The key that actors may share, to register keys of their own."""
HOST = "host"
"""The key of the hosts of agents on the run's own machine."""
ALLOWED = "allowed"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of keys, which exclude paths and hidden files."""
NO_FILE_LEFT = {errno.EMFILE, errno.ENFILE}
"""Errors of a process that can open no more files, because connections have taken all."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, z85."""

    public: bytes
    secret: bytes = field(repr=False)
    """The secret half, which is never logged."""


def make_keys(folder: Path) -> Path:
    """Make the keys of broker and learner, and an enrolment key; return the folder.

    Keys that exist are kept.

    Raises:
        SettingsError: A key that exists cannot be used.
        OSError: The folder cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in SERVERS:
        make_pair(folder, name)
    make_client(folder, ENROLMENT, role=ENROLMENT)
    return folder


def make_client(folder: Path, name: str, *, role: str = ACTOR) -> None:
    """Make the key pair of one more client and allow it to connect.

    An existing pair is left as it is, allowed or not; otherwise a revoked key would be allowed
    again. Raises as `make_pair`.
    """
    if not (folder / f"{name}.key").exists():
        make_pair(folder, name, allowed=folder / ALLOWED / role / f"{name}.pub")


def new_pair() -> KeyPair:
    """Make a key pair without files."""
    return KeyPair(*zmq.curve_keypair())


def load_pair(folder: Path, name: str) -> KeyPair:
    """Read a process's own key pair.

    Raises:
        SettingsError: The key is missing, malformed or readable by others.
    """
    path = folder / f"{name}.key"
    check_private(path)
    secret = read_key(path)
    return KeyPair(public=bytes(zmq.curve_public(secret)), secret=secret)


def check_private(path: Path) -> None:
    """Refuse a file with a secret that other users may have read.

    Raises:
        SettingsError: The file is missing, or readable by others.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _missing(path, error) from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and not _is_mounted_secret(status):
        raise SettingsError(
            f"{path} must be readable by its owner alone, got mode {mode:04o}; "
            f"`chmod 600 {path}` if nobody else has read it, else remove it and make it anew"
        )


def load_public(folder: Path, name: str) -> bytes:
    """Read the public key of a server.

    Raises:
        SettingsError: The key is missing or malformed.
    """
    return read_key(folder / f"{name}.pub")


def make_pair(folder: Path, name: str, *, allowed: Path | None = None) -> KeyPair:
    """Make a key pair, or load an existing one.

    A new secret is never readable by others. It is written last: where it exists, the pair is
    complete, and allowed if it has to be.

    Args:
        folder: Folder of the keys.
        name: Name of this key.
        allowed: A second file for the public half of a new pair, in the allow-list.

    Raises:
        SettingsError: The existing key is malformed or readable by others.
        OSError: The folder cannot be written.
    """
    path = folder / f"{name}.key"
    if not path.exists():
        pair = new_pair()
        for public in (allowed, folder / f"{name}.pub"):
            if public is not None:  # one without a secret is of a pair that was never finished
                durable.make_folder(public.parent, mode=0o700)
                durable.replace_file(public, pair.public + b"\n")
        durable.replace_file(path, pair.secret + b"\n", mode=0o600)
    pair = load_pair(folder, name)
    place_public(folder / f"{name}.pub", pair.public)
    return pair


def place_public(path: Path, public: bytes) -> None:
    """Write a public key where there is none yet."""
    if not path.exists():
        durable.make_folder(path.parent, mode=0o700)
        durable.replace_file(path, public + b"\n")


def forget_name(folder: Path, name: str) -> None:
    """Remove a client's own pair, so that a new key can have its name."""
    for suffix in ("key", "pub"):
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def read_key(path: Path) -> bytes:
    """Read one key, public or secret.

    Raises:
        SettingsError: The key is missing or malformed.
        OSError: This process can open no more files.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        if error.errno in NO_FILE_LEFT:
            raise
        raise _missing(path, error) from None
    if not is_key(key):
        shown = f"{len(key)} bytes" if len(key) != 40 else "40 bytes that are no z85"
        raise SettingsError(
            f"{path} must hold a z85 key of 40 characters, got {shown}; copy it again, or remove "
            f"it and make a new one with `nyala keys {path.parent}`"
        )
    return key


def is_key(key: bytes) -> bool:
    """Return whether these are 40 characters of z85, as a public or secret key has."""
    try:
        z85.decode(key)
    except (KeyError, ValueError, IndexError, struct.error):  # the last: digits beyond 32 bits
        return False
    return len(key) == 40


def _is_mounted_secret(status: os.stat_result) -> bool:
    """Whether a file is a Secret of Kubernetes with `fsGroup`: root's, and readable by a group."""
    is_read_only = stat.S_IMODE(status.st_mode) & ~0o440 == 0
    return status.st_uid == 0 and is_read_only and status.st_gid in {os.getegid(), *os.getgroups()}


def _missing(path: Path, error: OSError) -> SettingsError:
    if error.errno == errno.EACCES:
        remedy = (
            f"let user {os.geteuid()} read it, and nobody else; in Kubernetes give the pod an "
            f"fsGroup and the Secret defaultMode 0440"
        )
    else:
        remedy = (
            f"make keys with `nyala keys {path.parent}` or copy them from the learner's machine"
        )
    return SettingsError(
        f"{path} must be a key that this process can read, got {error.strerror}; {remedy}"
    )
