"""The checkpoints of a run as a person asks for them: listed, verified, chosen, removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from configs import durable
from configs.errors import CheckpointError
from learner.reporting.journal import Journal

from .folders import FOLDER, best_of, complete_checkpoints, step_of
from .learner_state import STATE, LearnerState
from .manifest import is_own, read_manifest, refuse_foreign, run_key
from .verification import verify

MIB = 2**20
BEST = "best"
"""Name of the checkpoint whose policy had the best held-out score."""


def listed(run_folder: Path) -> Iterator[Mapping[str, object]]:
    """Describe each checkpoint, the oldest first, without reading its tensors."""
    paths, journal = checkpoints_of(run_folder), Journal(run_folder)
    results = journal.held_out()
    best = best_of(paths, journal.scores())
    for path in paths:
        size = sum(file.stat().st_size for file in path.iterdir())
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        yield {
            "checkpoint": path.name,
            "lineage": _lineage(path),
            "MiB": round(size / MIB),
            "written": f"{written:%Y-%m-%d %H:%M:%S} UTC",
            "by": "this run" if is_own(path, run_key(run_folder)) else "another",
            "held out": round(result.score, 4) if (result := results.get(step_of(path))) else "",
            "of": result.title if result else "",
            "is": BEST if path == best else "",
        }


def verified(run_folder: Path, names: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Compare checkpoints, by default all, with their manifests and with the run's key."""
    for path in chosen(run_folder, names) if names else checkpoints_of(run_folder):
        yield {"checkpoint": path.name, "finding": _finding(path, run_folder)}


def intact(run_folder: Path, name: str | None) -> Path:
    """Return the named checkpoint, by default the newest, after comparing every byte.

    Raises:
        CheckpointError: It is not intact, not of this run, or not there.
    """
    paths = chosen(run_folder, [name]) if name else checkpoints_of(run_folder)[-1:]
    if not paths:
        raise CheckpointError(f"{run_folder / FOLDER} must hold a checkpoint, got none")
    refuse_foreign(paths[0], read_manifest(paths[0]), run_key(run_folder))
    verify(paths[0])
    return paths[0]


def pruned(
    run_folder: Path, keep: int, *, keep_best: bool = False
) -> Iterator[Mapping[str, object]]:
    """Remove all of the run's own but the newest `keep`, which must be intact, and the best.

    Raises:
        CheckpointError: One that is to stay is not intact; nothing is removed.
    """
    key = run_key(run_folder)
    own = [path for path in checkpoints_of(run_folder) if is_own(path, key)]
    best = best_of(own, Journal(run_folder).scores()) if keep_best else None
    stay = {*own[-keep:], best}
    for path in own:
        if path in stay:
            verify(path)
    for path in own:
        if path not in stay:
            durable.DISK.remove(path)
            yield {"removed": path.name}


def checkpoints_of(run_folder: Path) -> list[Path]:
    """List the complete checkpoints of a run, the oldest first."""
    return complete_checkpoints(run_folder / FOLDER)


def chosen(run_folder: Path, names: Sequence[str]) -> list[Path]:
    """Find checkpoints by their names; `best` is the one with the best held-out score.

    Raises:
        CheckpointError: There is none of such a name.
    """
    paths = checkpoints_of(run_folder)
    found = {path.name: path for path in paths}
    best = best_of(paths, Journal(run_folder).scores())
    found |= {BEST: best} if best is not None else {}
    for name in names:
        if name not in found:
            raise CheckpointError(
                f"{run_folder / FOLDER} must hold {name}, got {', '.join(found) or 'none'}"
            )
    return [found[name] for name in names]


def _lineage(path: Path) -> object:
    try:
        return LearnerState.decode((path / STATE).read_text(encoding="utf-8")).lineage
    except (CheckpointError, OSError, ValueError):
        return "unreadable"


def _finding(path: Path, run_folder: Path) -> str:
    try:
        refuse_foreign(path, read_manifest(path), run_key(run_folder))
        verify(path)
    except CheckpointError as error:
        return str(error)
    return "intact"
