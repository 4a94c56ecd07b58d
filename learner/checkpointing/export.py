"""Export of a checkpoint's model as a Hugging Face directory, as `transformers` and vLLM load it.

Read from the files of all ranks tensor by tensor, so that one file of weights is in memory at a
time, and never a model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from configs import durable
from configs.errors import CheckpointError
from configs.settings import RunSettings

from .fit import adapter_of
from .tensors.merged import MergedTensors
from .tensors.shards import Shards

PREFIX = "model.causal_lm."
FILE_BYTES = 2 * 2**30


def export_model(checkpoint: Path, run: RunSettings, folder: Path) -> None:
    """Write model and tokenizer in the dtype that the run publishes; what was there is replaced.

    Adapters are merged into the weights of the run's model.

    Args:
        checkpoint: Verified.
        run: Of the checkpoint; its model has configuration and tokenizer.
        folder: For the files.

    Raises:
        CheckpointError: It is in the format of an earlier release, or of another model.
    """
    shards: Shards | MergedTensors = Shards(checkpoint)
    dtype: torch.dtype = getattr(torch, run.dtype)
    names = [name for name in shards.shapes if name.startswith(PREFIX)]
    if not names:
        raise CheckpointError(
            f"{checkpoint} must be in the present format to be exported, got one of an earlier "
            "release; go on with the run once, which writes the next checkpoint in it"
        )
    if (adapter := adapter_of(checkpoint)) is not None:
        shards = MergedTensors(
            Shards(checkpoint), adapter, prefix=PREFIX, model_path=run.model_path, dtype=dtype
        )
        names = [*shards.shapes]
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    durable.DISK.remove(unfinished)
    durable.make_private_folder(unfinished)
    _write_weights(shards, _filled(shards, names, dtype), dtype, unfinished)
    config = AutoConfig.from_pretrained(run.model_path)
    config.dtype = dtype
    config.save_pretrained(unfinished)
    _copy_generation_config(run.model_path, unfinished)
    AutoTokenizer.from_pretrained(run.model_path, mistral_format=False).save_pretrained(unfinished)
    durable.sync_tree(unfinished)
    durable.DISK.remove(folder)
    durable.move(unfinished, folder)


def _copy_generation_config(model: str, folder: Path) -> None:
    """Copy what a model may have; `save_pretrained` refuses some that are on the hub."""
    found = cached_file(
        model,
        GENERATION_CONFIG_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is not None:
        shutil.copyfile(found, folder / GENERATION_CONFIG_NAME)


def _filled(
    shards: Shards | MergedTensors, names: Iterable[str], dtype: torch.dtype
) -> list[list[str]]:
    """Share tensors among files, in their order."""
    files: list[list[str]] = [[]]
    num_bytes = 0
    for name in names:
        size = torch.Size(shards.shapes[name]).numel() * dtype.itemsize
        if files[-1] and num_bytes + size > FILE_BYTES:
            files.append([])
            num_bytes = 0
        files[-1].append(name)
        num_bytes += size
    return files


def _write_weights(
    shards: Shards | MergedTensors, files: list[list[str]], dtype: torch.dtype, folder: Path
) -> None:
    """Write one file after the other, and their index where there are several."""
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, start=1):
        place = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        place = place if len(files) > 1 else "model.safetensors"
        tensors = {}
        for name in names:
            whole = shards.read_whole(name)
            tensors[name.removeprefix(PREFIX)] = (
                whole.to(dtype) if whole.is_floating_point() else whole
            )
        save_file(tensors, folder / place, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, place)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
