"""Lineages that the learners of a run have begun, in `lineages.json` in the run's folder.

A store that was rewound or wiped may lack the last ones, and a new learner must not begin one of
them again: its actors would have seen other weights under the same versions. Each life writes its
own before it publishes anything, so a learner that finds a later one there has been replaced.
The second line of the file is a checksum of the first: a digit that a disk has changed would
otherwise be another lineage.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from configs import durable
from configs.errors import CheckpointError, LostLineage

LINEAGES = "lineages.json"


def read_lineages(folder: Path) -> dict[int, int]:
    """Read lineage -> step it forked at from a run's folder; empty for a new run.

    Raises:
        CheckpointError: The file is not what `write_lineages` writes.
    """
    file = folder / LINEAGES
    try:
        text, _, checksum = file.read_bytes().partition(b"\n")
        if checksum not in (b"", _checksum(text)):  # an earlier release wrote none
            raise msgspec.DecodeError("another checksum than that of its content")
        return msgspec.json.decode(text, type=dict[int, int])
    except FileNotFoundError:
        return {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(
            f"{file} must map lineages to steps, got: {error}; restore it from a copy, or begin "
            "again with --fresh"
        ) from error


def write_lineages(folder: Path, lineages: Mapping[int, int]) -> None:
    """Replace the file in a run's folder; it is durable when this returns."""
    text = json.dumps(lineages).encode()
    durable.replace_file(folder / LINEAGES, text + b"\n" + _checksum(text))


def refuse_if_taken_over(run_folder: Path, lineage: int) -> None:
    """End a learner that was stopped while another took over; called before a rename.

    Raises:
        LostLineage: A later lineage has begun.
    """
    with suppress(CheckpointError):  # unreadable: the next start says so
        if (newest := max(read_lineages(run_folder), default=0)) > lineage:
            raise LostLineage(
                f"a checkpoint must be of the newest lineage, {newest}, got one of {lineage}; "
                "another learner has taken the run over, and this one must stop"
            )


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
