"""`nyala keys`: make the keys of a run, let somebody in, take somebody out, exchange a key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup


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
    help="Make the keys of a cluster, and say who may connect as what.\n\n"
    "With them the processes of a run know each other. `nyala up` makes keys of its own. Actors "
    "on other machines need actor.key and broker.pub; broker.key and learner.key stay where broker "
    "and learner run. Existing keys are kept. Changes take effect within a second, without a "
    "restart.\n\n"
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
    """Make the keys of broker, learner and actors; those that exist are kept."""
    from broker.transport.keys import make_keys
    from configs.errors import NyalaError

    try:
        print(make_keys(folder))
    except NyalaError as error:
        _refuse(error)


@app.command("list")
def list_keys(folder: Folder = HERE) -> None:
    """Show who may connect, and as what."""
    from broker.transport.allow_list import read_allowed

    for key, member in sorted(
        read_allowed(_keys_in(folder)).items(), key=lambda line: line[1].name
    ):
        print(f"{member.role:<9} {member.name:<24} {key.decode()}")


@app.command()
def add(
    name: Name,
    role: Annotated[str, typer.Option(help="actor, observer or operator.")] = "actor",
    folder: Folder = HERE,
) -> None:
    """Make one more key and let its holder in; copy the printed file and broker.pub to them."""
    from broker.transport.allow_list import Role
    from broker.transport.allow_list import add as add_key
    from configs.errors import NyalaError, SettingsError

    try:
        if role not in list(Role):
            raise SettingsError(
                f"--role must be one of {', '.join(Role)}, got {role}; "
                "an actor makes episodes, an observer looks, an operator revokes and drains"
            )
        print(add_key(_keys_in(folder), name, Role(role)))
    except NyalaError as error:
        _refuse(error)


@app.command()
def revoke(name: Name, folder: Folder = HERE) -> None:
    """Take a key off the list: its holder is refused within a second."""
    from broker.transport.allow_list import revoke as revoke_key
    from configs.errors import NyalaError

    try:
        roles = revoke_key(_keys_in(folder), name)
    except NyalaError as error:
        _refuse(error)
    print(f"{name} ({', '.join(roles)}) is off the list; what it holds goes to others")


@app.command()
def announce(folder: Folder = HERE) -> None:
    """Make the broker's next key; copy the printed file to the actors before `rotate broker`."""
    from broker.transport.key_rotation import announce_broker_key
    from configs.errors import NyalaError

    try:
        print(announce_broker_key(_keys_in(folder)))
    except NyalaError as error:
        _refuse(error)


@app.command()
def rotate(name: Name, folder: Folder = HERE) -> None:
    """Exchange the key of `broker`, or of an actor, observer or operator, without a stop."""
    from broker.transport.key_rotation import rotate_broker_key, rotate_client_key
    from configs.errors import NyalaError

    try:
        if name == "broker":
            rotate_broker_key(_keys_in(folder))
            print("running brokers take the new key up by themselves")
        else:
            previous = rotate_client_key(_keys_in(folder), name)
            print(f"{name} has a new key; `nyala keys revoke {previous}` ends the old one")
    except NyalaError as error:
        _refuse(error)


def _keys_in(folder: Path) -> Path:
    """Return the folder of the keys that a person names by itself or by its run."""
    for place in (folder / "keys", folder):
        if (place / "broker.pub").exists():
            return place
    print(
        f"nyala: --in must be a folder of keys or of a run, got {folder} without a broker.pub; "
        f"make keys with `nyala keys {folder}`",
        file=sys.stderr,
    )
    raise SystemExit(2)


def _refuse(error: Exception) -> NoReturn:
    print(f"nyala: {error}", file=sys.stderr)
    raise SystemExit(2)
