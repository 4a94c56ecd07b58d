"""Key rotation while a run goes on: the new key is known before the old one is gone.

An actor's key: the old one stays allowed under another name until it is revoked, and with an
enrolment key all that it registered.

    actor.key A, allowed A ──rotate──▶ actor.key B, allowed B and actor.previous A ──revoke──▶ B

The broker's key: its next public key is handed out, then the key is exchanged. A serving broker
adopts it by itself; its actors have to connect again, and try both public keys.

    broker.key A ──announce──▶ broker.next.pub B is copied to actors ──rotate──▶ broker.key B
"""

from __future__ import annotations

from pathlib import Path

from configs import durable
from configs.errors import SettingsError

from .allow_list import Role, enrolled_folder
from .keys import ALLOWED, load_pair, load_public, make_pair, place_public, read_key

NEXT = "broker.next"
PREVIOUS = "previous"


def announce_broker_key(folder: Path) -> Path:
    """Make the broker's next key; returns the public key that actors need before it is used."""
    make_pair(folder, NEXT)
    return folder / f"{NEXT}.pub"


def rotate_broker_key(folder: Path) -> None:
    """Put the announced key into the broker's place.

    Raises:
        SettingsError: none was announced.
    """
    if not (folder / f"{NEXT}.key").exists():
        raise SettingsError(
            f"the broker's next key must be announced before it is used, got no {NEXT}.key; "
            f"make it with `nyala keys announce --in {folder}` and copy {NEXT}.pub to the actors"
        )
    load_pair(folder, NEXT)
    # The public half first: an actor that connects in between still has it in `broker.next.pub`.
    for suffix in ("pub", "key"):
        durable.move(folder / f"{NEXT}.{suffix}", folder / f"broker.{suffix}")


def rotate_client_key(folder: Path, name: str) -> str:
    """Give an actor a new key; the old one stays allowed.

    With an old enrolment key stays what it registered: their tags, and so their leases, are those
    of that key, and it takes them along when it is revoked.

    Returns:
        The name to revoke when every process of the actor has been restarted.

    Raises:
        SettingsError: no key of this name is allowed, or its last rotation is not finished.
    """
    places = [*(folder / ALLOWED).glob(f"{name}.pub"), *(folder / ALLOWED).glob(f"*/{name}.pub")]
    if len(places) != 1:
        raise SettingsError(
            f"the key to rotate must be in {folder / ALLOWED} once, got {len(places)} of {name}; "
            "`nyala keys list` shows who is allowed"
        )
    (allowed,) = places
    previous = allowed.with_name(f"{name}.{PREVIOUS}.pub")
    if previous.exists():
        raise SettingsError(
            f"the last rotation must be finished first, got {previous}; "
            f"revoke {name}.{PREVIOUS} when no actor uses it any more"
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
        place_public(previous, read_key(allowed))  # its next name first: no key is ever nobody's
        durable.move(registered, enrolled_folder(folder, previous.stem))


def broker_public_keys(folder: Path) -> list[bytes]:
    """Read the keys that a broker of this run may have now: its own, then an announced one.

    Raises:
        SettingsError: the broker's public key is missing or malformed.
    """
    keys = [load_public(folder, "broker")]
    if (folder / f"{NEXT}.pub").exists():
        keys.append(load_public(folder, NEXT))
    return keys
