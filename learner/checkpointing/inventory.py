"""The checkpoints of a run for `nyala checkpoints` and `nyala try`: found, verified, removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs import durable
from configs.errors import CheckpointError
from learner.reporting.journal import Journal

from .folders import BEST, FOLDER, best_of, complete_checkpoints
from .manifest import is_own, read_manifest, refuse_foreign, run_key
from .verification import verify


def verified(run_folder: Path, names: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Compare checkpoints, all if `names` is empty, with their manifests and the run's key.

    The finding of each is "intact", or the text of the error for which it would be refused.

    Raises:
        CheckpointError: No checkpoint has such a name.
    """
    for path in chosen(run_folder, names) if names else checkpoints_of(run_folder):
        yield {"checkpoint": path.name, "finding": _finding(path, run_folder)}


def intact(run_folder: Path, name: str | None) -> Path:
    """Return the named checkpoint, by default the newest, after comparing every byte.

    Raises:
        CheckpointError: The checkpoint is not intact, not of this run, or not there.
    """
    paths = chosen(run_folder, [name]) if name else checkpoints_of(run_folder)[-1:]
    if not paths:
        raise CheckpointError(
            f"{run_folder / FOLDER} must hold a checkpoint, got none; let the run save one first "
            "(learner.checkpoint_every)"
        )
    refuse_foreign(paths[0], read_manifest(paths[0]), run_key(run_folder))
    verify(paths[0])
    return paths[0]


def pruned(
    run_folder: Path, keep: int, *, keep_best: bool = False
) -> Iterator[Mapping[str, object]]:
    """Remove the run's own checkpoints except the newest `keep`, and the best with `keep_best`.

    Those that stay are verified first; those of other runs stay, too, and are not looked at.

    Raises:
        CheckpointError: A checkpoint that is to stay is not intact; nothing is removed.
    """
    key = run_key(run_folder)
    paths = [path for path in checkpoints_of(run_folder) if is_own(path, key)]
    best = best_of(paths, Journal(run_folder).scores()) if keep_best else None
    stay = {*paths[-keep:], best}
    for path in paths:
        if path in stay:
            verify(path)
    for path in paths:
        if path not in stay:
            durable.DISK.remove(path)
            yield {"removed": path.name}


def checkpoints_of(run_folder: Path) -> list[Path]:
    """List the complete checkpoints of a run, the oldest first."""
    return complete_checkpoints(run_folder / FOLDER)


def chosen(run_folder: Path, names: Sequence[str]) -> list[Path]:
    """Find checkpoints by their names; `best` is the one with the best held-out score.

    Raises:
        CheckpointError: No checkpoint has such a name.
    """
    paths = checkpoints_of(run_folder)
    by_name = {path.name: path for path in paths}
    best = best_of(paths, Journal(run_folder).scores())
    by_name |= {BEST: best} if best is not None else {}
    for name in names:
        if name not in by_name:
            raise CheckpointError(
                f"{run_folder / FOLDER} must hold {name}, got {', '.join(by_name) or 'none'}; "
                "name one of these, or let the run save one"
            )
    return [by_name[name] for name in names]


def _finding(path: Path, run_folder: Path) -> str:
    try:
        refuse_foreign(path, read_manifest(path), run_key(run_folder))
        verify(path)
    except CheckpointError as error:
        return str(error)
    return "intact"
