"""`nyala join-pack`: one file with all that a machine needs to join a run, written and opened.

`nyala actor FILE` and `nyala doctor FILE` open it on that machine.
"""

from __future__ import annotations

import hashlib
import io
import ipaddress
import json
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

import typer

from broker.transport.allow_list import Role
from broker.transport.allow_list import add as add_key
from broker.transport.allow_list import revoke as revoke_key
from broker.transport.keys import ENROLMENT, check_private, forget_name
from configs.errors import SettingsError
from configs.hashes import run_hashes
from configs.loader import save
from configs.machine import user_cache
from configs.settings import Settings
from console.command_line import Run
from console.run.run_folder import run_folder_of, settings_of
from console.run.user_files import with_value

# --------------------------------------------------------------------------------------------------
# Join-packs: one archive with all that a machine needs to join a run with its actors.
#
#     NAME.nyala              a tar file of mode 0600, as it holds a secret
#       pack.json             the run, its hashes, and where its model lies
#       RUN/config.yaml       the run's settings, with the address at which its broker is reached
#       RUN/keys/             broker.pub, and an enrolment key of the pack's own
#       RUN/init/, RUN/model/ the model, where it is a folder
#
# What it unpacks to is the folder of a run as far as an actor looks. The hashes are those that the
# broker compares, so that a missing or other file is named before anything is loaded.

FORMAT = 1
CONTENTS = "pack.json"
PUBLIC_KEYS = ("broker.pub", "broker.next.pub")


@dataclass(frozen=True, slots=True)
class Contents:
    """`pack.json`: written by `write_pack`, read by `open_pack`."""

    format: int
    run: str
    hashes: dict[str, str]
    """As an actor sends them with HELLO."""
    has_model: bool
    """`run.model` is the folder `model` beside config.yaml."""


def write_pack(run: Path, host: str, name: str, out: Path, *, with_model: bool = True) -> None:
    """Write a pack with a new key, which the broker admits from then on.

    Args:
        run: Folder of the run.
        host: Address at which other machines reach this one.
        name: Name of the key.
        out: Path of the pack, a new file.
        with_model: Include a model that is a folder; False = it lies at the same path elsewhere.

    Raises:
        SettingsError: Other machines cannot reach the run, a file is missing or in the way, or the
            name is that of another key.
    """
    folder, settings = run_folder_of(run), settings_of(run)
    if out.exists():
        raise SettingsError(f"--out must be a new file, got {out}, which exists; name another")
    if not out.parent.is_dir():
        raise SettingsError(
            f"--out must be in a folder that exists, got {out}; make {out.parent} first"
        )
    reached = _as_reached(settings, host)
    model = _model_of(settings) if with_model or settings.run.model == "init" else None
    keys = settings.broker.keys or folder.keys
    secret = add_key(keys, name, Role.ENROLMENT)
    contents = Contents(
        FORMAT,
        settings.run.name,
        run_hashes(settings.run),
        has_model=model is not None and settings.run.model != "init",
    )
    try:
        with tempfile.TemporaryDirectory() as place:
            config = Path(place) / "config.yaml"
            save(reached, config)
            files = {"config.yaml": config, f"keys/{ENROLMENT}.key": secret}
            files |= {f"keys/{key}": keys / key for key in PUBLIC_KEYS if (keys / key).exists()}
            if model is not None:
                files["model" if contents.has_model else "init"] = model
            _write(out, contents, files)
    except BaseException:
        out.unlink(missing_ok=True)
        revoke_key(keys, name)
        raise
    finally:
        forget_name(keys, name)  # from here on the pack alone has it


def is_pack(path: Path) -> bool:
    """Whether a path is a pack, rather than a settings file or the folder of a run."""
    return path.is_file() and tarfile.is_tarfile(path)


def open_pack(pack: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Unpack a pack into this user's cache, unless it is there from an earlier time.

    Returns:
        The folder to join with, and the overrides with those of the pack before them.

    Raises:
        SettingsError: The pack is open to others or damaged, or this machine differs from the run.
    """
    check_private(pack)
    with pack.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    place = user_cache() / f"{pack.stem}-{digest[:16]}"
    if not place.exists():
        _unpack(pack, place)
    contents = Contents(**json.loads((place / CONTENTS).read_bytes()))
    folder = place / contents.run
    model_setting = [f"run.model={json.dumps(str(folder / 'model'))}"] if contents.has_model else []
    changed = [*model_setting, *overrides]
    _compare(contents, settings_of(folder, changed))
    return folder, changed


def _compare(contents: Contents, settings: Settings) -> None:
    """Refuse settings, files and packages that differ from those of the run."""
    here = run_hashes(settings.run)
    differing = [part for part, value in contents.hashes.items() if here.get(part) != value]
    if differing:
        raise SettingsError(
            f"{', '.join(differing)} on this machine must be as on the run's machine, got other "
            f"settings, files or packages; copy them from there, or name them with --set"
        )


def _as_reached(settings: Settings, host: str) -> Settings:
    """Return the settings for an actor on another machine."""
    if not host or "/" in host or _has_port(host):
        raise SettingsError(
            f"--host must be the address or name of this machine alone, got {host!r}; "
            f"leave out scheme and port, which is that of broker.endpoint"
        )
    is_loopback = host == "localhost" or _has_property(host, "is_loopback")
    if not is_loopback:  # otherwise this machine, or through a tunnel
        _refuse_loopback("broker.endpoint", settings.broker.endpoint, 5757)
        if settings.learner.advertise is None:
            publisher = settings.learner.publisher_endpoint
            _refuse_loopback("learner.publisher_endpoint", publisher, 5758)
    others = [_replaced(endpoint, host) for endpoint in settings.broker.other_endpoints]
    reached = with_value(
        settings, "broker", "endpoint", _replaced(settings.broker.endpoint, host, always=True)
    )
    for table, key, value in (
        ("broker", "other_endpoints", tuple(others)),
        ("broker", "keys", None),
        ("buffer", "url", None),  # an actor has no business with Redis
        ("run", "directory", Path()),
    ):
        reached = with_value(reached, table, key, value)
    return reached


def _refuse_loopback(setting: str, endpoint: str, port: int) -> None:
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if host == "localhost" or _has_property(host, "is_loopback"):
        raise SettingsError(
            f"{setting} must be reachable from other machines, got {endpoint}; "
            f"start the run with --set {setting}=tcp://0.0.0.0:{parts.port or port}"
        )


def _replaced(endpoint: str, host: str, *, always: bool = False) -> str:
    """Put the host into an endpoint of all addresses of this machine."""
    parts = urlsplit(endpoint)
    hostname = parts.hostname or ""
    if not always and hostname != "*" and not _has_property(hostname, "is_unspecified"):
        return endpoint
    return f"tcp://[{host}]:{parts.port}" if ":" in host else f"tcp://{host}:{parts.port}"


def _has_property(host: str, name: str) -> bool:
    """Return a property of `ipaddress`, such as `is_loopback`; False for a host's name."""
    try:
        return bool(getattr(ipaddress.ip_address(host), name))
    except ValueError:  # a name
        return False


def _has_port(host: str) -> bool:
    if ":" not in host:
        return False
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return True
    return False


def _model_of(settings: Settings) -> Path | None:
    """Return the folder of the run's model; None for a name on the hub."""
    folder = Path(settings.run.model_path).expanduser()
    if folder.is_dir():
        return folder
    if settings.run.model == "init":
        raise SettingsError(
            f"run.model must have been made before it is packed, got none at {folder}; "
            f"start the run, or `nyala init-model`"
        )
    return None


def _write(out: Path, contents: Contents, files: dict[str, Path]) -> None:
    text = json.dumps(asdict(contents), indent=2).encode()
    opened = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # Links are followed: in a cache of models every file is one.
    with (
        os.fdopen(opened, "wb") as file,
        tarfile.open(fileobj=file, mode="w", dereference=True) as archive,
    ):
        head = tarfile.TarInfo(CONTENTS)
        head.size = len(text)
        archive.addfile(head, io.BytesIO(text))
        for name, path in files.items():
            archive.add(path.resolve(), f"{contents.run}/{name}")


def extract(archive: tarfile.TarFile, members: Iterable[tarfile.TarInfo], into: Path) -> None:
    """Extract files and folders; `tarfile` has had a filter for that since Python 3.11.4 only.

    Raises:
        ValueError: There are other entries, or a name that leads out of the folder.
    """
    for member in members:
        parts = PurePosixPath(member.name).parts
        if not parts or parts[0] == "/" or ".." in parts or not (member.isreg() or member.isdir()):
            raise ValueError(f"{member.name}, which no such file has")
        target = into.joinpath(*parts)
        folder = target if member.isdir() else target.parent
        folder.mkdir(parents=True, exist_ok=True)
        if (content := archive.extractfile(member)) is not None:
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)
            target.chmod(member.mode & 0o755)


def _unpack(pack: Path, place: Path) -> None:
    """Unpack into a folder beside the target, then rename it: several actors may begin at once."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=place.parent))  # mode 0700
    try:
        with tarfile.open(pack) as archive:
            extract(archive, archive, beside)
        contents = json.loads((beside / CONTENTS).read_bytes())
        if contents["format"] != FORMAT:
            raise ValueError(f"pack format {contents['format']} instead of {FORMAT}")
        beside.rename(place)
    except (tarfile.TarError, ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise SettingsError(
            f"{pack} must be a pack that `nyala join-pack` of this version wrote, got: {error}; "
            f"write another on the run's machine"
        ) from None
    except OSError:
        if not place.exists():  # otherwise another actor was first
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# `nyala join-pack`: one file with which another machine joins a run.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("join-pack")
def join_pack(
    run: Run,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where other machines reach this one.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the pack's key, such as site-a.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="By default NAME.nyala.")] = None,
    without_model: Annotated[
        bool,
        typer.Option(
            "--without-model", help="Leave out a model that lies at the same path elsewhere."
        ),
    ] = False,
) -> None:
    """Write one file with which another machine joins a run.

    It holds the settings, the broker's address and public key, the model if that is a folder, and
    a key of its own with which any number of actors register theirs. Copy it there, then
    `nyala actor FILE`.

    Example: `nyala join-pack runs/demo --host hub.example.org --name site-a`
    """
    name = name or f"pack-{secrets.token_hex(3)}"
    file = out or Path(f"{name}.nyala")
    write_pack(run, host, name, file, with_model=not without_model)
    print(file)
    print(f"it holds a secret; to shut its actors out: nyala keys revoke {name} --in {run}")
