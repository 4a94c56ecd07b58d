"""A policy version as a safetensors file that any tool can read, and the digest of such a file.

The file's own order of tensors is not that of the wire, so the header names the order, the version
and the digest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from actors.engine.wire_tensors import named_tensors
from broker.protocol.manifest import WeightManifest, digest_of
from buffer.record.episode import PolicyVersion
from configs import durable
from configs.errors import WeightsError


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Header of a file, and the digest of its bytes."""

    version: PolicyVersion
    digest: str
    """From the header: that of the version that was pulled."""
    found: str
    """Digest of the bytes that are in the file now."""


def save_weights(staged: Path, manifest: WeightManifest, path: Path) -> None:
    """Write staged wire bytes as safetensors; the file appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".unfinished-{path.name}")
    tensors = dict(named_tensors(staged, manifest.tensors, manifest.num_bytes))
    header = {
        "format": "pt",
        "version": json.dumps(list(manifest.version)),
        "digest": manifest.digest,
        "order": json.dumps(list(tensors)),
    }
    save_file(tensors, unfinished, metadata=header)
    durable.DISK.sync(unfinished)
    durable.move(unfinished, path)


def read_weights(path: Path) -> WeightFile:
    """Digest the tensors of a file.

    Raises:
        WeightsError: It is no file of `save_weights`.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            lineage, step = json.loads(header["version"])
            order = json.loads(header["order"])
            found = digest_of(_bytes_of(file.get_tensor(name)) for name in order)
            return WeightFile(PolicyVersion(lineage, step), header["digest"], found)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(
            f"{path} must be a file of `nyala weights pull`, got: {error!r}; pull it again"
        ) from error


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
