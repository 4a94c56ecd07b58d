"""Checkpoints of adapters: they alone are saved, resumed, refused beside another base, exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from configs.errors import CheckpointError
from configs.settings import LearnerSettings, RunSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.export import export_model
from learner.checkpointing.resume import roll_back
from learner.checkpointing.tensors import Shards
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import train_batch
from learner.weights.layout import layout
from tests.learner.support.adapted_policy import (
    PACKED,
    WIDE,
    adapted_policy,
    fill_adapters,
    published_bytes,
)
from tests.learner.support.adapted_policy import SETTINGS as ADAPTERS
from tests.learner.support.exact_gradients import SETTINGS, packed
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.ranks.layouts import STATE
from tests.learner.support.tiny_policy import (
    constant_rate,
    parameters_of,
    save_tiny_model,
    tiny_causal_lm,
    tiny_policy,
)


def _train(policy: Policy, optimizer: ScheduledOptimizer, steps: range, ranks: Ranks) -> None:
    for step in steps:
        microbatches = packed(random_group_episodes(4, 3, seed=step), 64)
        train_batch(policy, optimizer, step, microbatches, settings=SETTINGS, ranks=ranks)


def _saved(folder: Path, ranks: Ranks) -> tuple[Checkpoints, Path]:
    policy, optimizer = adapted_policy(ranks)
    _train(policy, optimizer, range(1, 3), ranks)
    checkpoints = Checkpoints(folder, keep=1, ranks=ranks)
    return checkpoints, checkpoints.save(STATE, policy, optimizer)


def test_adapters_and_their_moments_alone_are_saved_and_resumed_to_the_bit(
    tmp_path: Path, ranks: Ranks
) -> None:
    through = adapted_policy(ranks)
    _train(*through, range(1, 5), ranks)

    checkpoints, saved = _saved(tmp_path, ranks)
    resumed = adapted_policy(ranks)
    checkpoints.load(saved, *resumed)
    _train(*resumed, range(3, 5), ranks)

    names = Shards(saved).shapes
    assert len(names) == 2 * 2 * 7 * 4 and all(".lora_" in name for name in names)
    ours, theirs = parameters_of(*through), parameters_of(*resumed)
    assert len(ours) > len(names) * 3 / 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_rollback_without_a_checkpoint_begins_adapters_anew(tmp_path: Path, ranks: Ranks) -> None:
    policy, optimizer = adapted_policy(ranks)
    _train(policy, optimizer, range(1, 3), ranks)
    checkpoints = Checkpoints(tmp_path, keep=1, ranks=ranks)

    assert roll_back(checkpoints, policy, optimizer, model_path="", before=None) == 0

    _train(policy, optimizer, range(1, 3), ranks)
    again = adapted_policy(ranks)
    _train(*again, range(1, 3), ranks)
    pairs = zip(parameters_of(policy, optimizer), parameters_of(*again), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints, saved = _saved(tmp_path, ranks)
    full = tiny_policy(ranks.mesh)
    plain = full, ScheduledOptimizer(full, constant_rate(1e-3), LearnerSettings())
    full_saved = Checkpoints(tmp_path / "full", keep=1, ranks=ranks).save(STATE, *plain)

    def refused(path: Path, policy: Policy, optimizer: ScheduledOptimizer, text: str) -> None:
        before = parameters_of(policy, optimizer)
        with pytest.raises(CheckpointError, match=text):
            checkpoints.load(path, policy, optimizer)
        after = parameters_of(policy, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    other_rank = adapted_policy(ranks, settings=LearnerSettings(lora_rank=4, lora_alpha=5.0))
    refused(saved, *other_rank, r"lora_rank = 4 .*, got one of learner.lora_rank = 3 and lora_al")
    other_scale = adapted_policy(ranks, settings=LearnerSettings(lora_rank=3))
    refused(saved, *other_scale, r"lora_alpha = 6, got one of .* and lora_alpha = 5; restore")
    wide = tiny_causal_lm(width=WIDE), tiny_causal_lm(width=WIDE)
    packed, plain_base = (
        adapted_policy(ranks, settings=each, causal_lm=model)
        for each, model in zip((PACKED, ADAPTERS), wide, strict=True)
    )
    packed_saved = Checkpoints(tmp_path / "packed", keep=1, ranks=ranks).save(STATE, *packed)
    refused(packed_saved, *plain_base, r"restore run.model, run.dtype and learner.base_dtype, or")
    refused(saved, *adapted_policy(ranks, seed=1), r"must have adapters of the run's model, whose")
    refused(saved, *plain, r"must be of learner.lora_rank = 0, got one of learner.lora_rank = 3")
    refused(full_saved, *adapted_policy(ranks), r"got one of learner.lora_rank = 0; restore the")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
def test_the_merged_model_is_exported_in_float32(
    tmp_path: Path, ranks: Ranks, dtype: str, base: str
) -> None:
    tokenizer = save_tiny_model(tmp_path / "model", width=WIDE)
    policy, optimizer = adapted_policy(
        ranks,
        settings=ADAPTERS.model_copy(update={"base_dtype": base}),
        dtype=dtype,
        vocabulary=len(tokenizer),
    )
    fill_adapters(policy)
    saved = Checkpoints(tmp_path / "run", keep=1, ranks=ranks).save(STATE, policy, optimizer)
    run = RunSettings.model_validate(
        {"model": str(tmp_path / "model"), "environment": "calculator", "dtype": dtype}
    )

    export_model(saved, run, tmp_path / "exported")

    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    published = bytearray(published_bytes(policy.causal_lm, "float32"))
    for spec in layout(policy.causal_lm, "float32"):
        tensor = tensors.pop(spec.name)
        assert tensor.dtype == torch.float32
        place = slice(spec.offset, spec.offset + spec.num_bytes)
        assert tensor.view(torch.uint8).numpy().tobytes() == published[place]
    assert not tensors

    save_tiny_model(tmp_path / "model", seed=1, width=WIDE)
    with pytest.raises(CheckpointError, match=r"run.model must be the one that the adapters"):
        export_model(saved, run, tmp_path / "exported")


def test_an_export_that_a_full_disk_does_not_take_is_removed(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    policy = tiny_policy(ranks.mesh)
    plain = policy, ScheduledOptimizer(policy, constant_rate(1e-3), LearnerSettings())
    saved = Checkpoints(tmp_path / "checkpoints", keep=1, ranks=ranks).save(STATE, *plain)
    monkeypatch.setattr("learner.checkpointing.export.save_file", fill)

    with pytest.raises(SafetensorError, match="No space left"):
        export_model(saved, RunSettings(model="init", directory=tmp_path), tmp_path / "model")

    assert not list(tmp_path.glob("*model*"))
