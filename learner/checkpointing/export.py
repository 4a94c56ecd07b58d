"""Export of a checkpoint: a model as `transformers` and vLLM load it, adapters as PEFT does.

Called by the loop for a finished run, by `nyala checkpoints export` and by `nyala try`. Read from
the files of all ranks tensor by tensor, so that one file of weights is in memory at a time, and
never a model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from broker.protocol.manifest import digest_of
from broker.weights.low_rank import add_low_rank
from configs import durable
from configs.errors import CheckpointError
from configs.settings import RunSettings
from learner.model.frozen import pack, unpack
from learner.model.lora import Adapter, bytes_of
from learner.model.saved_model import SavedWeights, empty_causal_lm
from learner.weights.layout import published

from .checkpoint import adapter_of
from .tensors import Shards

# --------------------------------------------------------------------------------------------------
# The tensors of a model with the adapters of a checkpoint: whole, one at a time, in no rank.
#
# The base is read from the run's model and rounded to the dtype that is published, as the learner
# did. A stand-in for `Shards` where they are exported.


class MergedTensors:
    """Base and adapters, by the names that a checkpoint of the whole model would have."""

    def __init__(
        self, shards: Shards, adapter: Adapter, *, prefix: str, model_path: str, dtype: torch.dtype
    ) -> None:
        """Open the base model, and compare its digest with that of the model that was trained.

        Args:
            shards: Tensors of the checkpoint, with the adapters.
            adapter: Identity of the adapters.
            prefix: Prefix of the names of the model's tensors.
            model_path: Folder or name of the base model.
            dtype: Dtype of the published weights.

        Raises:
            CheckpointError: The base model is another one.
        """
        self._shards, self._adapter, self._prefix, self._dtype = shards, adapter, prefix, dtype
        model = empty_causal_lm(model_path)
        self._base = SavedWeights(model, model_path)
        self.shapes = {f"{prefix}{name}": shape for name, shape in self._base.shapes.items()}
        digest = digest_of(bytes_of(self._of_base(name)) for name, _ in published(model))
        if digest != adapter.base:
            raise CheckpointError(
                f"run.model must be the one that the adapters were trained with, whose digest is "
                f"{adapter.base[:12]}, got {digest[:12]} in {Path(model_path)}; restore run.model "
                "and run.dtype"
            )

    def read_whole(self, name: str) -> Tensor:
        """Return a tensor whole, in float32, with its adapter added if it has one."""
        whole = self._of_base(name.removeprefix(self._prefix)).float()
        a, b = (f"{name.removesuffix('weight')}lora_{part}" for part in "ab")
        if a in self._shards.shapes:
            factors = self._shards.read_whole(b), self._shards.read_whole(a)
            add_low_rank(whole, *factors, scale=self._adapter.scale)
        return whole

    def _of_base(self, name: str) -> Tensor:
        """Read a tensor of the base, rounded as the learner did."""
        whole, rounding = self._base.read(name), self._adapter.rounding
        adapter = f"{self._prefix}{name.removesuffix('weight')}lora_a"
        if rounding == "nf4" and adapter in self._shards.shapes:
            whole = unpack(*pack(whole))
        elif rounding is not None:
            whole = whole.bfloat16()
        return whole.to(self._dtype)


# --------------------------------------------------------------------------------------------------
# Export of a checkpoint's model as a Hugging Face directory, as `transformers` and vLLM load it.

log = structlog.get_logger()

PREFIX = "model.causal_lm."
FILE_BYTES = 2 * 2**30


def export_model(checkpoint: Path, run: RunSettings, folder: Path) -> None:
    """Write model and tokenizer in the dtype that the run publishes; what was there is replaced.

    A folder that is there is removed, with all other files in it. Adapters are merged into the
    weights of the run's model, and saved in float32: in bfloat16 the nearest value is the unchanged
    weight for much of what they have learned.

    Args:
        checkpoint: Folder of a verified checkpoint.
        run: Settings of the checkpoint's run; its model has configuration and tokenizer.
        folder: Folder that the files are written to.

    Raises:
        CheckpointError: The checkpoint cannot be read, or its adapters are of another base model.
    """
    shards: Shards | MergedTensors = Shards(checkpoint)
    dtype: torch.dtype = getattr(torch, run.dtype)
    names = [name for name in shards.shapes if name.startswith(PREFIX)]
    if (adapter := adapter_of(checkpoint)) is not None:
        shards = MergedTensors(
            Shards(checkpoint), adapter, prefix=PREFIX, model_path=run.model_path, dtype=dtype
        )
        names, dtype = [*shards.shapes], torch.float32
    with _put_in_place(folder) as unfinished:
        _write_weights(shards, _split_into_files(shards, names, dtype), dtype, unfinished)
        config = AutoConfig.from_pretrained(run.model_path)
        config.dtype = dtype
        config.save_pretrained(unfinished)
        _copy_generation_config(run.model_path, unfinished)
        tokenizer = AutoTokenizer.from_pretrained(run.model_path, mistral_format=False)
        tokenizer.save_pretrained(unfinished)


def export_adapter(checkpoint: Path, run: RunSettings, folder: Path) -> None:
    """Write the adapters alone in PEFT's form, in float32; a folder that is there is removed.

    Args:
        checkpoint: Folder of a verified checkpoint.
        run: Settings of the checkpoint's run.
        folder: Folder that the files are written to.

    Raises:
        CheckpointError: The checkpoint has no adapters, or cannot be read.
    """
    adapter = adapter_of(checkpoint)
    if adapter is None:
        raise CheckpointError(
            f"{checkpoint} must hold adapters (learner.lora_rank), got whole weights; export the "
            "model instead, without --adapter"
        )
    if adapter.rounding == "nf4":
        log.warning("the adapter was trained beside a model in 4 bits", path=str(folder))
    shards = Shards(checkpoint)
    tensors, modules = {}, set()
    for name in shards.shapes:
        module, _, factor = name.removeprefix(PREFIX).rpartition(".lora_")
        if name.startswith(PREFIX) and module:
            whole = shards.read_whole(name).float().contiguous()
            tensors[f"base_model.model.{module}.lora_{factor.upper()}.weight"] = whole
            modules.add(module.rpartition(".")[2])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.model_path,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    with _put_in_place(folder) as unfinished:
        save_file(tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2)
        (unfinished / "adapter_config.json").write_text(text, encoding="utf-8")


@contextmanager
def _put_in_place(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which replaces another one once it is filled and durable."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    durable.DISK.remove(unfinished)
    durable.make_private_folder(unfinished)
    with durable.removed_if_unwritten(unfinished, errors=Exception):  # safetensors has its own
        yield unfinished
        durable.sync_tree(unfinished)
    durable.DISK.remove(folder)
    durable.move(unfinished, folder)


def _copy_generation_config(model: str, folder: Path) -> None:
    """Copy the generation config if there is one; `save_pretrained` refuses some of the hub's."""
    config_path = cached_file(
        model,
        GENERATION_CONFIG_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if config_path is not None:
        shutil.copyfile(config_path, folder / GENERATION_CONFIG_NAME)


def _split_into_files(
    shards: Shards | MergedTensors, names: Iterable[str], dtype: torch.dtype
) -> list[list[str]]:
    """Split tensors, in their order, into files of at most `FILE_BYTES`, or of one tensor."""
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
