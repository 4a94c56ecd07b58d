"""Folders of checkpoints: names, renames, list, the best; and the run's file of lineages.

checkpoints/.unfinished-step-000050/   -> written, hashed, synced
checkpoints/step-000050/               -> renamed: it exists only if it is complete
checkpoints/refused-step-000050/       -> found damaged and set aside, for a person to look at
checkpoints/.replaced-step-000050/     -> of the same step, until the new one is in its place

The learner renames; the console lists too, so nothing here loads torch.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from configs import durable
from configs.errors import CheckpointError, LostLineage
from learner.reporting.journal import Journal

from .manifest import (
    MANIFEST,
    encode_manifest,
    is_own,
    read_manifest,
    refuse_foreign,
    run_key,
)

FOLDER = "checkpoints"
UNFINISHED, REFUSED, REPLACED = ".unfinished-", "refused-", ".replaced-"
"""Prefixes of folders that do not count as checkpoints."""
STATE = "state.json"
"""File of a checkpoint with the state of the learner besides tensors."""
BEST = "best"
"""Name of the checkpoint whose policy had the best held-out score."""
MIB = 2**20


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in a folder, oldest first."""
    folders = (path for path in folder.glob("step-*") if path.is_dir())
    return sorted(
        (path for path in folders if path.name.removeprefix("step-").isdecimal()), key=step_of
    )


def step_of(path: Path) -> int:
    """Return the number of batches in a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))  # as text, step 1000000 is before step 999999


def best_of(paths: Iterable[Path], scores: Mapping[int, float]) -> Path | None:
    """Return the checkpoint with the best held-out score, the later of equal ones.

    None if no checkpoint has a score.

    Args:
        paths: Folders of checkpoints.
        scores: Step -> held-out score of the policy after it.
    """
    evaluated = [path for path in paths if step_of(path) in scores]
    return max(evaluated, key=lambda path: (scores[step_of(path)], step_of(path)), default=None)


def may_be_best(
    path: Path,
    among: Iterable[Path],
    scores: Mapping[int, float],
    is_evaluated: Callable[[int], bool],
) -> bool:
    """Whether a checkpoint is the best of those that are evaluated, or its evaluation is open."""
    step = step_of(path)
    is_open = step > max(scores, default=0)
    candidates = (candidate for candidate in among if is_evaluated(step_of(candidate)))
    return is_evaluated(step) and (is_open or path == best_of(candidates, scores))


def listed(run_folder: Path) -> Iterator[Mapping[str, object]]:
    """Describe each checkpoint of a run, the oldest first, without torch and without a tensor.

    Makes the run's key if there are checkpoints and no key.

    Raises:
        CheckpointError: The run's key is malformed, or others can read it.
    """
    paths, journal = complete_checkpoints(run_folder / FOLDER), Journal(run_folder)
    results = journal.held_out()
    best = best_of(paths, journal.scores())
    for path in paths:
        size = sum(file.stat().st_size for file in path.iterdir())
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        result = results.get(step_of(path))
        yield {
            "checkpoint": path.name,
            "lineage": _lineage_of(path),
            "MiB": round(size / MIB),
            "written": f"{written:%Y-%m-%d %H:%M:%S} UTC",
            "by": "this run" if is_own(path, run_key(run_folder)) else "another",
            "held out": round(result.score, 4) if result else "",
            "of": result.title if result else "",
            "is": BEST if path == best else "",
        }


def _lineage_of(path: Path) -> object:
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))["lineage"]
    except (OSError, ValueError, TypeError, KeyError):
        return "unreadable"


def lend(path: Path, run_folder: Path) -> None:
    """Make a checkpoint of a run one of another run too; its tensors are not copied if possible.

    Args:
        path: The checkpoint, in the folder of its run.
        run_folder: Folder of the other run, which has no such checkpoint.

    Raises:
        CheckpointError: The run of the checkpoint did not write it, or a key is malformed.
    """
    manifest = read_manifest(path)
    refuse_foreign(path, manifest, run_key(path.parent.parent))
    lent = run_folder / FOLDER / path.name
    durable.make_private_folder(lent.parent)
    durable.make_folder(lent, mode=0o700)
    for name in manifest.digests:
        try:  # no file of a checkpoint is ever changed
            (lent / name).hardlink_to(path / name)
        except OSError:  # another disk, or one without links
            shutil.copyfile(path / name, lent / name)
    durable.replace_file(lent / MANIFEST, encode_manifest(manifest.digests, run_key(run_folder)))


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it counts no longer.

    One that was set aside before, of the same step, is deleted.
    """
    aside = path.with_name(f"{REFUSED}{path.name}")
    durable.DISK.remove(aside)  # the same step was refused once before
    durable.move(path, aside)


def put_in_place(unfinished: Path, final: Path) -> None:
    """Move a checkpoint to its place, and delete one that is there already.

    At any moment one of the two can be found, by `restore_replaced` after a power loss.
    """
    replaced = final.with_name(f"{REPLACED}{final.name}")
    if final.exists():
        durable.DISK.remove(replaced)
        durable.move(final, replaced)
    durable.move(unfinished, final)
    durable.DISK.remove(replaced)


def restore_replaced(folder: Path) -> None:
    """Finish or undo a replacement that a power loss interrupted."""
    for replaced in folder.glob(f"{REPLACED}*"):
        final = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if final.exists():
            durable.DISK.remove(replaced)
        else:
            durable.move(replaced, final)


# --------------------------------------------------------------------------------------------------
# Lineages that the learners of a run have begun, in `lineages.json` in the run's folder.
#
# A store that was rewound or wiped may lack the last ones, and a new learner must not begin one of
# them again: its actors would have seen other weights under the same versions. Each life writes its
# own before it publishes anything, so a learner that finds a later one there has been replaced.
# The second line of the file is a checksum of the first: a digit that a disk has changed would
# otherwise be another lineage.

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
            raise msgspec.DecodeError("its checksum does not match its content")
        return msgspec.json.decode(text, type=dict[int, int])
    except FileNotFoundError:
        return {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(
            f"{file} must map lineages to steps, got other content ({error}); restore it from a "
            "copy, or begin again with --fresh"
        ) from error


def write_lineages(folder: Path, lineages: Mapping[int, int]) -> None:
    """Replace the file in a run's folder; it is durable when this returns."""
    text = json.dumps(lineages).encode()
    durable.replace_file(folder / LINEAGES, text + b"\n" + _checksum(text))


def refuse_if_taken_over(run_folder: Path, lineage: int) -> None:
    """Refuse a learner of which another took over while it was stopped; called before a rename.

    Does nothing where the file of lineages cannot be read.

    Raises:
        LostLineage: A later lineage has begun.
    """
    with suppress(CheckpointError):  # unreadable: the next start says so
        if (newest := max(read_lineages(run_folder), default=0)) > lineage:
            raise LostLineage(
                f"a checkpoint must be of the newest lineage, {newest}, got one of {lineage}; "
                "another learner has taken the run over, and this one must stop: leave the other "
                "one alone"
            )


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
