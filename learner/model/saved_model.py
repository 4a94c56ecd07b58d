"""A model in Hugging Face's format, read shard by shard.

    empty_causal_lm      modules on the meta device, and buffers that are computed, not saved
    check_first_layers   first layers, whole: a model that could not be trained exactly is refused
    allocate             memory for this rank's part of each weight, once the modules are sharded
    read_weights         this rank's part of each weight, from the safetensors files

So the ranks of a host hold each weight once. Names in the files may differ from the module's as
`transformers` allows; a weight that `transformers` would compute from several is refused.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from configs.architecture import check_architecture
from configs.errors import SettingsError
from learner.weights.layout import SCALES, is_own, is_packed, shape_of

from .attention import check_packing
from .frozen import pack
from .output_layer import check_output_layer, output_layer

# --------------------------------------------------------------------------------------------------
# Tensors in safetensors files, whole or cut into pieces, read box by box.
#
# A rank reads just its piece of a tensor, wherever the files were cut.


class Box(NamedTuple):
    """Where a rank's piece lies in a tensor."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    offset: tuple[int, ...]


def box_of(tensor: Tensor) -> Box:
    """Compute where this rank's piece of a tensor lies."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(whole, (0,) * len(whole))
    _, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    return Box(whole, tuple(int(start) for start in offset))


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a tensor; it shares the tensor's memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorFiles:
    """The tensors of several opened files; a tensor may have pieces in more than one."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[Any, tuple[int, ...]]]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """Name -> data type, as the format names it."""

    def add(self, file: Any, boxes: Mapping[str, Box]) -> None:
        """Add the tensors of a file.

        Args:
            file: As `safe_open` returns it.
            boxes: Boxes of the file's pieces; all other tensors are whole.
        """
        for name in file.keys():  # noqa: SIM118 - not a mapping
            piece = file.get_slice(name)
            shape = tuple(piece.get_shape())
            whole, offset = boxes.get(name, (shape, (0,) * len(shape)))
            self._pieces[name].append((file, tuple(offset)))
            self.shapes[name] = tuple(whole)
            self.dtypes[name] = piece.get_dtype()

    @torch.no_grad()
    def read(self, name: str, local: Tensor, offset: tuple[int, ...]) -> int:
        """Fill `local`, whose first element is at `offset`, from the pieces that overlap it.

        Returns:
            The elements that were filled; fewer than all where pieces are missing.
        """
        filled = 0
        for file, at in self._pieces[name]:
            piece = file.get_slice(name)
            starts = [max(a, b) for a, b in zip(at, offset, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(at, piece.get_shape(), offset, local.shape, strict=True)
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            span = list(zip(starts, ends, strict=True))
            theirs = tuple(slice(s - a, e - a) for (s, e), a in zip(span, at, strict=True))
            ours = tuple(slice(s - b, e - b) for (s, e), b in zip(span, offset, strict=True))
            part = piece[theirs] if theirs else file.get_tensor(name)
            local[ours].copy_(part)
            filled += part.numel()
        return filled


# --------------------------------------------------------------------------------------------------
# A model in Hugging Face's format, read shard by shard.

FIRST_TOKENS = 16
"""Rows of the embeddings that the checks need."""


def empty_causal_lm(path: str | Path) -> PreTrainedModel:
    """Make the modules of a saved causal language model, without memory for its weights.

    Weights will be in float32: steps of 1e-6 vanish in bfloat16. On a GPU, FSDP2 casts to bfloat16
    for the forward and backward passes if `run.dtype` is bfloat16.

    Raises:
        SettingsError: No such model, or one of an unsupported architecture.
    """
    try:
        config = AutoConfig.from_pretrained(str(path))
        check_architecture(config.to_dict())
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
    except SettingsError:  # of an architecture that is not supported: it says what to do
        raise
    except (OSError, ValueError) as error:
        raise _no_model(path, error) from error
    layers_of(causal_lm.base_model)  # refuses a model that could not be sharded
    for module in causal_lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    causal_lm.initialize_weights()  # and buffers; weights have no memory yet
    return cast("PreTrainedModel", causal_lm.eval())


def load_causal_lm(path: str | Path) -> PreTrainedModel:
    """Load a causal language model whole, in float32 on the CPU.

    Raises:
        SettingsError: No such model, or one that cannot be trained exactly.
    """
    causal_lm = empty_causal_lm(path)
    check_first_layers(causal_lm, path)
    allocate(causal_lm, torch.device("cpu"))
    read_weights(causal_lm, path)
    return causal_lm


def layers_of(trunk: nn.Module) -> Iterable[nn.Module]:
    """List the transformer layers of a model without its output layer.

    Raises:
        SettingsError: The model has no list named `layers`.
    """
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise SettingsError(
            f"run.model must keep its transformer layers in a list named layers, as Llama and Qwen "
            f"do, got {type(trunk).__name__} without one; choose another model"
        )
    return layers


def check_first_layers(causal_lm: PreTrainedModel, path: str | Path) -> None:
    """Refuse a model that could not be trained exactly.

    The first layers run with their weights, up to the last one that differs from all before.

    Args:
        causal_lm: Model that `empty_causal_lm` returned.
        path: Path of the saved model.

    Raises:
        SettingsError: The model could not be trained exactly.
    """
    first = copy.deepcopy(causal_lm)
    layers = cast("nn.ModuleList", layers_of(first.base_model))
    kinds = [_kind(layer, number, causal_lm.config) for number, layer in enumerate(layers)]
    first.base_model.layers = layers[: 1 + max(kinds.index(kind) for kind in kinds)]
    first.config.num_hidden_layers = len(first.base_model.layers)
    first.config.vocab_size = min(FIRST_TOKENS, first.config.vocab_size)
    embeddings: Any = first.get_input_embeddings()
    output: Any = output_layer(first)
    is_tied = output.weight is embeddings.weight
    for layer in (embeddings, output):
        layer.weight = nn.Parameter(layer.weight.detach()[:FIRST_TOKENS])
    embeddings.padding_idx = None
    if is_tied:
        output.weight = embeddings.weight
    if output.bias is not None:
        output.bias = nn.Parameter(output.bias.detach()[:FIRST_TOKENS])
    allocate(first, torch.device("cpu"))
    read_weights(first, path, first_rows=True)
    check_output_layer(first)
    check_packing(first)


def _kind(layer: nn.Module, number: int, config: Any) -> object:
    """Describe a layer, but for its number: its modules, and what they are set to."""
    settings = [
        (name, type(module), {k: v for k, v in vars(module).items() if _is_setting(k, v)})
        for name, module in layer.named_modules()
    ]
    types = getattr(config, "layer_types", None)
    return settings, types and types[number]


def _is_setting(name: str, value: object) -> bool:
    return name != "layer_idx" and isinstance(value, bool | int | float | str | None)


def allocate(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Give the parameters of a module memory on a device; buffers keep their values.

    Args:
        module: The outermost, so that FSDP notices.
        device: For parameters and buffers.
        offload: For buffers alone; parameters lie in host memory.
    """
    buffers = dict(module.named_buffers())
    module.to_empty(device="cpu" if offload else device)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        for owner in module.modules():
            if isinstance(owner, PreTrainedModel):
                owner.tie_weights()  # sharded ones stay tied


@torch.no_grad()
def read_weights(model: PreTrainedModel, path: str | Path, *, first_rows: bool = False) -> None:
    """Read this rank's part of each weight; no rank waits for another.

    Args:
        model: Sharded or not, with memory: a causal language model, or the base model of one.
        path: Path of the saved model.
        first_rows: The files may have further rows of a tensor, which are not read.

    Raises:
        SettingsError: The files cannot be read, lack a weight or have it in another shape, or hold
            two different ones that the configuration ties.
    """
    files = _open(path)
    keys = _keys(model, files.shapes)
    for names, tensor in _tensors_of(model):
        if is_own(names[0]):
            continue  # not of the saved model: `lora.py` begins adapters, `_read_packed` has scales
        saved = [keys[name] for name in names if name in keys]
        if not saved and isinstance(tensor, nn.Parameter):
            raise SettingsError(
                f"run.model must hold {names[0]} as a tensor of its own, got none in {path}; "
                f"download or save it again, or choose another model"
            )
        if is_packed(tensor):
            scales = model.get_parameter(f"{names[0].removesuffix('weight')}{SCALES}")
            _read_packed(files, saved[0], tensor, scales, path)
        else:
            _read(files, saved, tensor, path, first_rows=first_rows)


class SavedWeights:
    """The weights of a saved model, read whole, one at a time."""

    def __init__(self, model: PreTrainedModel, path: str | Path) -> None:
        """Open the files of a saved model.

        Args:
            model: Model of the same architecture; its own weights need no memory.
            path: Path of the saved model.

        Raises:
            SettingsError: There is no such model.
        """
        self._path, self._files = path, _open(path)
        keys = _keys(model, self._files.shapes)
        self._keys: dict[str, list[str]] = {}
        for names, _ in _tensors_of(model):
            if saved := [keys[name] for name in names if name in keys]:
                self._keys[names[0]] = saved
        self.shapes = {name: self._files.shapes[saved[0]] for name, saved in self._keys.items()}
        """Name -> shape, in the model's order; tied ones have their first name."""

    def read(self, name: str) -> Tensor:
        """Read a weight in float32."""
        whole = torch.empty(self.shapes[name])
        _read(self._files, self._keys[name], whole, self._path, first_rows=False)
        return whole


def _tensors_of(model: nn.Module) -> Iterable[tuple[list[str], Tensor]]:
    """List the tensors of a model, each with its names: tied ones have several."""
    by_id: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
    return by_id.values()


def _read(
    files: TensorFiles, keys: list[str], tensor: Tensor, path: str | Path, *, first_rows: bool
) -> None:
    """Read a tensor, which the files may have under several names."""
    local, offset = local_of(tensor), box_of(tensor).offset
    for number, key in enumerate(keys):
        shape = files.shapes[key]
        if first_rows:
            shape = tuple(min(sizes) for sizes in zip(shape, tensor.shape, strict=False))
        _check_shape(key, shape, tensor, path)
        into = local if number == 0 else torch.empty_like(local)
        files.read(key, into, offset)
        if not torch.equal(into, local):
            raise SettingsError(
                f"run.model must hold {keys[0]} and {key} alike, which its config.json ties, got "
                f"two that differ in {path}; set tie_word_embeddings to false there"
            )


def _read_packed(
    files: TensorFiles, key: str, codes: Tensor, scales: Tensor, path: str | Path
) -> None:
    """Read this rank's rows of a matrix, and keep them in 4 bits."""
    _check_shape(key, files.shapes[key], codes, path)
    local = local_of(codes)
    rows = torch.empty(len(local), shape_of(codes)[1], device=local.device)
    files.read(key, rows, box_of(codes).offset)
    for part, into in zip(pack(rows), (local, local_of(scales)), strict=True):
        into.copy_(part)


def _check_shape(key: str, shape: tuple[int, ...], tensor: Tensor, path: str | Path) -> None:
    if shape != shape_of(tensor):
        raise SettingsError(
            f"run.model must hold {key} of shape {shape_of(tensor)}, as its config.json says, got "
            f"{shape} in {path}; download or save it again, or choose another model"
        )


def _keys(model: PreTrainedModel, keys: Iterable[str]) -> Mapping[str, str]:
    """Map the name of each of the model's tensors to its key in the files."""
    conversions = get_model_conversion_mapping(model)
    renamings = [change for change in conversions if isinstance(change, WeightRenaming)]
    names = dict.fromkeys(model.state_dict(), True)
    prefix = model.base_model_prefix
    keys_by_name: dict[str, str] = {}
    for key in keys:
        name, _ = rename_source_key(key, renamings, [], prefix, names)
        if name not in names:
            name, _ = rename_source_key(key, [], [], prefix, names)
        if name in names:
            keys_by_name[name] = key
    return keys_by_name


def _open(path: str | Path) -> TensorFiles:
    """Open the files of a saved model."""
    files = TensorFiles()
    try:
        for name in _file_names(path):
            files.add(safe_open(str(cached_file(str(path), name)), framework="pt"), {})
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _no_model(path, error) from error
    return files


def _file_names(path: str | Path) -> list[str]:
    """List the files: one, or those of an index."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    if cached_file(str(path), SAFE_WEIGHTS_NAME, **quiet) is not None:
        return [SAFE_WEIGHTS_NAME]
    index = cached_file(str(path), SAFE_WEIGHTS_INDEX_NAME, **quiet)
    if index is None:
        raise ValueError(f"it has no {SAFE_WEIGHTS_NAME}; save it again with `save_pretrained`")
    places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    return sorted(set(places.values()))


def _no_model(path: str | Path, error: Exception) -> SettingsError:
    return SettingsError(
        f"run.model must be a Hugging Face model directory or hub name, got {str(path)!r} "
        f"({str(error).splitlines()[0]}); correct the name, mend the folder, or choose another "
        "model"
    )
