"""Tensors of a checkpoint: any number of ranks reads what any number wrote, to the bit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.errors import CheckpointError
from configs.settings import LearnerSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.manifest import MANIFEST, encode_manifest
from learner.checkpointing.tensors import (
    Shards,
    TensorShard,
    encode_shards,
    random_state,
    restore_random_state,
)
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import Box
from learner.reporting.metrics import Totals
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.tiny_policy import constant_rate

STATE = LearnerState("r", "h", 1, lineage=1, cursor=0, trained=(), totals=Totals())


def _tiny_policy(ranks: Ranks) -> tuple[Policy, ScheduledOptimizer]:
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    policy = Policy(Qwen3ForCausalLM(config), temperature=1.0)
    policy = shard(policy, ranks.mesh, dtype=torch.float32)
    return policy, ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())


def test_tied_embeddings_and_every_other_tensor_are_saved_once(
    tmp_path: Path, ranks: Ranks
) -> None:
    policy, optimizer = _tiny_policy(ranks)
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, ranks=ranks)

    path = checkpoints.save(STATE, policy, optimizer)

    parameters = sum(p.numel() for p in policy.parameters())
    stored = sum(t.numel() for t in load_file(path / "tensors-0.safetensors").values())
    assert stored == 3 * parameters + len(list(policy.parameters()))  # and a step of each


def _write(folder: Path, whole: Tensor, cuts: list[list[int]]) -> None:
    """Write a tensor cut along each dimension, each piece as a rank's."""
    for file in folder.glob("tensors-*"):
        file.unlink()
    boxes: list[tuple[slice, ...]] = [()]
    for dimension in cuts:
        spans = [slice(a, b) for a, b in pairwise(dimension)]
        boxes = [(*box, span) for box in boxes for span in spans]
    for rank, box in enumerate(boxes):
        place = Box(tuple(whole.shape), tuple(span.start for span in box))
        piece = TensorShard(whole[box], place)
        content = b"".join(encode_shards({"t": piece}))
        (folder / f"tensors-{rank}.safetensors").write_bytes(content)
    _list(folder)


def _list(folder: Path) -> None:
    """Write a manifest of the files that are there."""
    names = [file.name for file in folder.glob("tensors-*")]
    (folder / MANIFEST).write_bytes(encode_manifest(dict.fromkeys(names, ""), b"key"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_box_is_read_from_any_cut(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(7 * 5).reshape(7, 5).to(dtype)
    for cuts in ([[0, 7], [0, 5]], [[0, 4, 7], [0, 5]], [[0, 2, 4, 7], [0, 3, 5]]):
        _write(tmp_path, whole, cuts)
        shards = Shards(tmp_path)
        assert shards.dtypes == {"t": dtype}
        assert torch.equal(shards.read_whole("t"), whole)
        for start, end in ((0, 3), (3, 7), (6, 7), (2, 2)):
            part = torch.zeros(end - start, 5, dtype=dtype)
            shards._read_box("t", part, (start, 0))
            assert torch.equal(part, whole[start:end])

    last = (tmp_path / "tensors-1.safetensors").rename(tmp_path / "gone.safetensors")
    _list(tmp_path)
    last.rename(tmp_path / "tensors-1.safetensors")  # there again, and not in the manifest
    with pytest.raises(
        CheckpointError, match=r"must hold all 35 elements of t from offset .*, got 31"
    ):
        Shards(tmp_path).read({"t": torch.zeros(7, 5, dtype=dtype)})
    with pytest.raises(CheckpointError, match=r"must hold u of shape \(2,\), got none"):
        Shards(tmp_path).read({"u": torch.zeros(2)})


def test_a_file_that_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensors-0.safetensors").write_bytes(json.dumps({}).encode())
    _list(tmp_path)

    with pytest.raises(CheckpointError, match="must hold tensors"):
        Shards(tmp_path)


def test_the_random_state_is_restored(ranks: Ranks) -> None:
    state = random_state(ranks.device)
    expected = torch.rand(3)

    restore_random_state(state + b"of a GPU that is gone", ranks.device)

    assert torch.equal(torch.rand(3), expected)
