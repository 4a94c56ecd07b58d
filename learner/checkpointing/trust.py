"""Trust in a checkpoint that this run did not write: checked, then made the run's own.

    --trust-checkpoint step-000050 -> digests of all files -> the same run -> MAC of this run

Its weights decide what is trained, and one of an earlier release can run code of whoever wrote it:
so a person has to name it. It is done once, before the learner starts; nothing of it is a setting.
"""

from __future__ import annotations

from configs import durable
from configs.errors import SettingsError
from configs.settings import RunSettings

from .folders import FOLDER, complete_checkpoints
from .manifest import MANIFEST, encode_manifest, read_manifest, run_key
from .resume import check_same_run
from .verification import verify


def trust_checkpoint(run: RunSettings, name: str) -> None:
    """Make a checkpoint in the run's folder the run's own.

    Raises:
        SettingsError: There is none of this name.
        CheckpointError: It is damaged, or of a run with other settings.
    """
    found = {path.name: path for path in complete_checkpoints(run.folder / FOLDER)}
    if name not in found:
        raise SettingsError(
            f"--trust-checkpoint must name a checkpoint in {run.folder / FOLDER}, got {name!r}; "
            f"there are: {', '.join(found) or 'none'}"
        )
    path = found[name]
    check_same_run(run, verify(path), path)
    manifest = read_manifest(path)
    sealed = encode_manifest(manifest.digests, run_key(run.folder), algorithm=manifest.algorithm)
    durable.replace_file(path / MANIFEST, sealed)
