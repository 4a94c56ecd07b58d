"""Rows of a dataset by number: JSON lines, JSON, CSV, parquet, or whatever `datasets` loads.

Rows are mappings of columns. JSON lines stay in their file and are parsed on demand, so that every
actor of a machine can open a large file. Other formats are held in memory, parquet by column.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import shlex
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec

from configs.errors import SettingsError, quoted
from configs.machine import install_command
from configs.user_code import missing

Row = Mapping[str, Any]

ROWS_AT_ONCE = 1024
NEW_LINE = b"\n"
_QUICK = msgspec.json.Decoder()


class Rows(Protocol):
    """Rows by number, from 0; iterating over all of them is faster."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Row]: ...

    def __getitem__(self, number: int, /) -> Row: ...


def open_rows(path: str, *, subset: str | None = None, split: str = "train") -> Rows:
    """Open the rows of a dataset.

    Args:
        path: A file (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`), a folder that `datasets` has
            saved, or a name on the Hugging Face hub.
        subset: Subset to load, where the name on the hub has several.
        split: Split to load from a folder or a name.

    Raises:
        SettingsError: There is no such file or split, the file cannot be read, or the package that
            reads it is not installed. A bad line of JSON lines is refused when it is read.
    """
    place = Path(path).expanduser()
    reader = _READERS.get(place.suffix.lower())
    if place.is_dir():
        return _load_by_datasets(_load_saved, path, split)
    if _is_on_a_hub(path, place) and reader is None:
        return _load_by_datasets(partial(_load_from_hub, subset=subset), path, split)
    if reader is None:
        raise SettingsError(
            f"the path of a dataset must end with one of {', '.join(_READERS)}, or be a folder of "
            f"`datasets` or a name on its hub, got {path}; convert it, or name another"
        )
    try:
        return reader(place)
    except SettingsError:
        raise
    except FileNotFoundError:
        raise SettingsError(
            f"the path of a dataset must be a readable file, got {path} ({missing(path)}); correct "
            "the path, or put the file there"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"the path of a dataset must be a readable file, got {path} in {Path.cwd()}: "
            f"{error.strerror or error}; name a file that this user can read"
        ) from None
    except UnicodeDecodeError as error:
        raise _not_utf8(path, place, error) from None
    except ValueError as error:  # of CSV, JSON and parquet
        raise SettingsError(
            f"a dataset must be readable, got {path}: {error!s:.200}; mend the file, or name "
            "another"
        ) from None


class JsonLinesRows:
    """Lines of a file, each a JSON object; empty ones are left out.

    The file stays open. Reading a row raises `SettingsError` where its line is not such an object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with path.open("rb") as file:
            self._begins = array("Q", accumulate(map(len, file), initial=0))
            file.seek(0)
            blank = [number for number, is_blank in enumerate(map(bytes.isspace, file)) if is_blank]
        for number in reversed(blank):  # a row may end with them
            del self._begins[number]

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            lines = (line for line in file if line.strip())
            for number, text in zip(range(len(self)), lines, strict=False):
                yield self._row(number, text)

    def __getitem__(self, number: int) -> Row:
        begin, end = self._begins[number : number + 2]
        return self._row(number, os.pread(self._file, end - begin, begin))

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def _row(self, number: int, text: bytes) -> Row:
        try:
            row = _QUICK.decode(text)
        except ValueError:
            try:
                row = json.loads(text.strip())  # takes NaN, and says in which column it is wrong
            except UnicodeDecodeError as error:
                raise _not_utf8(self.where(number), self._path, error) from None
            except ValueError as error:
                raise SettingsError(
                    f"{self.where(number)} must be JSON, got: {error}; mend that line"
                ) from None
            _check_characters(row, self.where(number))
        return row if type(row) is dict else _checked_row(row, self.where(number))

    def where(self, number: int) -> str:
        """Name the line of a row."""
        with self._path.open("rb") as file:
            before = file.read(self._begins[number])
        return f"line {before.count(NEW_LINE) + 1} of {self._path}"


class ArrowRows:
    """Columns of Arrow, a row at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=ROWS_AT_ONCE):
            yield from batch.to_pylist()

    def __getitem__(self, number: int) -> Row:
        (row,) = self._table.slice(number, 1).to_pylist()
        return _checked_row(row, f"row {number + 1}")


def _json(path: Path) -> Sequence[Row]:
    rows = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise SettingsError(
            f"a dataset in JSON must be a list of objects, got {type(rows).__name__} in {path}; "
            f"write a list, or name a file with one object a line `.jsonl`"
        )
    places = [f"item {number} of {path}" for number in range(1, len(rows) + 1)]
    for row, where in zip(rows, places, strict=True):
        _check_characters(row, where)
    return [_checked_row(row, where) for row, where in zip(rows, places, strict=True)]


def _csv(path: Path) -> Sequence[Row]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(2**24)
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, delimiter=delimiter))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SettingsError(
                f"row {number} of {path} must have as many fields as the first line names, got "
                f"{'more' if None in row else 'fewer'}; quote fields that contain {delimiter!r}, "
                "and add those that are missing"
            )
    return rows


def _parquet(path: Path) -> Rows:
    parquet = _package("pyarrow.parquet", f"{path} must be read by pyarrow")
    return ArrowRows(parquet.read_table(path))


def _is_on_a_hub(path: str, place: Path) -> bool:
    """Whether it is `owner/name`, and not a file of an unknown kind; names may have points."""
    is_file = place.exists() or (place.suffix and place.parent.exists())
    return path.count("/") == 1 and not path.startswith(("/", "~", ".")) and not is_file


def _load_by_datasets(load: Callable[[Any, str], Any], path: str, split: str) -> Rows:
    datasets = _package("datasets", f"{path} must be loaded by the package datasets")
    loaded = load(datasets, path)
    parts = loaded if isinstance(loaded, datasets.DatasetDict) else {split: loaded}
    if split not in parts:
        raise SettingsError(
            f"the split of a dataset must be one of {', '.join(parts)}, got {split!r} of {path}; "
            "set split or held_out_split of run.environment_settings to one of them"
        )
    rows: Rows = parts[split]
    return rows


def _load_saved(datasets: Any, path: str) -> Any:
    try:
        return datasets.load_from_disk(str(Path(path).expanduser()))
    except Exception as error:  # noqa: BLE001 - whatever that package raises, there are no rows
        raise SettingsError(
            "the path of a dataset must be a file, or a folder that `datasets` has saved with "
            f"save_to_disk, got {path}: {_one_line(error)}; save it in this way, or name another"
        ) from None


def _load_from_hub(datasets: Any, path: str, *, subset: str | None) -> Any:
    try:
        return datasets.load_dataset(path, subset)
    except Exception as error:  # noqa: BLE001 - as above
        if "config" in str(error).lower() and isinstance(error, ValueError):
            then = "name one of its subsets as run.environment_settings.subset"
        else:
            then = (
                "check the name, HF_TOKEN where it is not public, and that this machine can reach "
                "the hub; or load it elsewhere, save it with `to_parquet`, and name that file"
            )
        raise SettingsError(
            f"the path of a dataset must be a file, a folder of `datasets`, or owner/name of one "
            f"on its hub, got {path}: {_one_line(error)}; {then}"
        ) from None


def _not_utf8(where: str, path: Path, error: UnicodeDecodeError) -> SettingsError:
    """Make the error of a file in another encoding, with the command that mends it."""
    with path.open("rb") as file:
        mark = file.read(2)
    encoding = "UTF-16" if mark in {b"\xff\xfe", b"\xfe\xff"} else "WINDOWS-1252"
    source, target = shlex.quote(str(path)), shlex.quote(f"utf8-{path.name}")
    start = error.start
    return SettingsError(
        f"{where} must be in UTF-8, got byte 0x{error.object[start]:02x} at position {start}; "
        f"write the file again, if it is in {encoding}: "
        f"`iconv -f {encoding} -t UTF-8 {source} > {target}`"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


def _package(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise SettingsError(
            f"{what}, which is not installed; install the extra `data`: {install_command('data')}"
        ) from None


def _check_characters(row: Any, where: str) -> None:
    """Refuse half of a surrogate pair, which cannot be encoded."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise SettingsError(
            f"{where} must have whole characters, got {half!r}, half of a surrogate pair; "
            f"write the character, or leave it out"
        ) from None


def _checked_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise SettingsError(
            f"{where} must be an object of columns, got {quoted(row, 60)}; write names of columns "
            "with their values"
        )
    return row


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": JsonLinesRows,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
