"""`nyala keys`: the keys of a run, made, listed, added, revoked and exchanged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from broker.transport.allow_list import AllowListEntry, Role, read_allowed
from broker.transport.allow_list import add as add_key
from broker.transport.allow_list import revoke as revoke_key
from broker.transport.enrolled import (
    announce_broker_key,
    last_seen,
    path_of,
    rotate_broker_key,
    rotate_client_key,
)
from broker.transport.keys import make_keys
from configs.errors import SettingsError


class _WithoutVerb(TyperGroup):
    """Reads `nyala keys FOLDER` as `nyala keys make FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_WithoutVerb,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make the keys of a cluster, and choose who may connect.\n\n"
    "The processes of a run recognise each other by their keys. `nyala up` makes keys of its own, "
    "one for each actor. Actors elsewhere need broker.pub, and enrolment.key, with which each "
    "registers a key that it makes itself, or a key from `nyala keys add` as actor.key. broker.key "
    "and learner.key stay where broker and learner run. Existing keys are kept. Changes take "
    "effect within a second, without a restart.\n\n"
    "Example: `nyala keys keys/`, then `nyala keys add spot-7 --in keys/`",
)

Name = Annotated[str, typer.Argument(help="Name of a key, such as spot-7.")]
Folder = Annotated[
    Path, typer.Option("--in", metavar="FOLDER", help="Folder of the keys, or of the run.")
]
HERE = Path("keys")


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where to put them, such as keys/.")],
) -> None:
    """Make the keys of broker and learner, and one with which actors enrol.

    Those that exist are kept.

    Example: `nyala keys make keys/`
    """
    print(make_keys(folder))


@app.command("list")
def list_keys(folder: Folder = HERE) -> None:
    """Show which keys may connect, and as what.

    Those that actors have registered come after their enrolment key, with the time since each was
    last heard.

    Example: `nyala keys list --in runs/demo`
    """
    place = _keys_in(folder)
    now = time.time()
    for key, member in sorted(read_allowed(place).items(), key=_listing_order):
        seen = ""
        if member.enrolled_by is not None:
            at = last_seen(path_of(place, member))
            seen = "  seen ?" if at is None else f"  seen {max(0.0, now - at):.0f} s ago"
        print(f"{member.role:<9} {member.name:<30} {key.decode()}{seen}")


@app.command()
def add(
    name: Name,
    role: Annotated[
        str, typer.Option(help="actor, enrolment, host, observer or operator.")
    ] = "actor",
    folder: Folder = HERE,
) -> None:
    """Make one more key, and admit its holder.

    Copy the printed file and broker.pub to the machine of its holder.

    Example: `nyala keys add spot-7 --in runs/demo`
    """
    if role not in list(Role):
        raise SettingsError(
            f"--role must be one of {', '.join(Role)}, got {role}; choose by what its holder does: "
            "an actor makes episodes, an enrolment key registers keys of actors, a host runs live "
            "agents, an observer looks, an operator revokes and drains"
        )
    print(add_key(_keys_in(folder), name, Role(role)))


@app.command()
def revoke(name: Name, folder: Folder = HERE) -> None:
    """Take a key off the list.

    Its holder is refused within a second. With an enrolment key goes all that it registered.

    Example: `nyala keys revoke spot-7 --in runs/demo`
    """
    roles = revoke_key(_keys_in(folder), name)
    print(f"{name} ({', '.join(roles)}) is off the list; what it holds goes to others")


@app.command()
def announce(folder: Folder = HERE) -> None:
    """Make the broker's next key, before the exchange.

    Copy the printed file to the actors before `nyala keys rotate broker`.

    Example: `nyala keys announce --in runs/demo`
    """
    print(announce_broker_key(_keys_in(folder)))


@app.command()
def rotate(name: Name, folder: Folder = HERE) -> None:
    """Exchange a key without a stop.

    NAME is `broker`, or the name of a key of an actor, observer or operator.

    Example: `nyala keys rotate broker --in runs/demo`
    """
    if name == "broker":
        rotate_broker_key(_keys_in(folder))
        print("running brokers take the new key up by themselves")
    else:
        previous = rotate_client_key(_keys_in(folder), name)
        print(f"{name} has a new key; `nyala keys revoke {previous}` ends the old one")


def _listing_order(line: tuple[bytes, AllowListEntry]) -> tuple[str, str]:
    """Sort keys by name, and those that actors registered behind their enrolment key."""
    member = line[1]
    return (member.enrolled_by or member.name, member.name if member.enrolled_by else "")


def _keys_in(folder: Path) -> Path:
    """Return the folder of the keys that a person names by itself or by its run.

    Raises:
        SettingsError: There are no keys.
    """
    for place in (folder / "keys", folder):
        if (place / "broker.pub").exists():
            return place
    raise SettingsError(
        f"--in must be a folder of keys or of a run, got {folder} without a broker.pub; "
        f"name another, or make keys with `nyala keys {folder}`"
    )
