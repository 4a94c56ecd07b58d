"""Layers compiled by `torch.compile`, for any number of tokens at once.

Attention stays as it is, between two compiled halves of a layer: it cuts its tokens by the lengths
of the sequences, and each combination of lengths would be compiled anew. Layers alike share what is
compiled. Gathering by FSDP2 and activation checkpointing lie outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn
from transformers import AttentionInterface

from configs.errors import SettingsError

from .attention import PACKED, attend_over_ranks


def compile_layers(layers: Iterable[nn.Module], device_type: str) -> None:
    """Let each layer be compiled when it is first run; before it is checkpointed and sharded.

    Raises:
        SettingsError: There is nothing to compile with.
    """
    _check_compiler(device_type)
    AttentionInterface.register(PACKED, torch.compiler.disable(attend_over_ranks))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _check_compiler(device_type: str) -> None:
    """Find what inductor calls: a C++ compiler on a CPU, and a C compiler for Triton on a GPU."""
    names = [os.environ.get("CXX", "g++")]
    if device_type == "cuda":
        names = [os.environ.get("CC", "gcc"), "clang"]
    if not any(shutil.which(name) for name in names):
        raise SettingsError(
            f"learner.compile must be false without a compiler, got true; none of {names} is "
            "installed"
        )
