"""Compiled layers: the same gradients as eager ones, and few compilations whatever the lengths.

What dynamo makes of a layer: what inductor makes of that takes a C++ compiler half a minute, and is
compared by `./run test-long compile`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface

from configs.errors import SettingsError
from configs.machine import COMPILED
from learner.assembly import load_policy
from learner.model.activations import Kept
from learner.model.attention import PACKED, attend_over_ranks
from learner.model.policy import compile_layers, probe_logprobs, rounded_logprobs
from learner.model.ranks import Ranks
from tests.learner.support.compiled_layers import gradients, policies
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import tiny_settings

PROBE = (3, 9, 4, 4, 17)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts what is compiled, by no compiler; attention is as it was afterwards."""
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, attend_over_ranks)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_compiled_layers_have_the_gradients_of_eager_ones_and_are_compiled_once(
    ranks: Ranks, counter: CompileCounterWithBackend
) -> None:
    eager, compiled = policies(ranks, torch.float64, "full")
    names = [name for name, _ in eager.named_parameters()]
    compilations = []

    for number in range(3):
        found, expected = gradients(compiled, number), gradients(eager, number)
        compilations.append(counter.frame_count)
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-10 * float(theirs.abs().max())

    assert compilations[0] > 0 and compilations[-1] == compilations[0], compilations
    assert [name for name, _ in compiled.named_parameters()] == names


@pytest.mark.parametrize("compiled", [True, False])
def test_a_learner_that_compiles_names_the_folders(
    tmp_path: Path, ranks: Ranks, counter: CompileCounterWithBackend, compiled: bool
) -> None:
    settings = tiny_settings(tmp_path, learner={"compile": compiled})
    save_tiny_model(Path(settings.run.model_path))

    with capture_logs() as lines:
        load_policy(settings, ranks, is_trained=True)

    assert [line.keys() >= COMPILED.keys() for line in lines] == [True] * compiled


@pytest.mark.parametrize("was_compiled", [False, True], ids=["at first", "once compiled"])
@pytest.mark.parametrize("kept", ["none", "full"])
def test_the_probes_rounding_goes_past_what_is_compiled(
    ranks: Ranks, counter: CompileCounterWithBackend, kept: Kept, was_compiled: bool
) -> None:
    eager, compiled = policies(ranks, torch.float32, kept)
    expected = probe_logprobs(eager, PROBE)
    if was_compiled:
        assert probe_logprobs(compiled, PROBE) == pytest.approx(expected, abs=1e-5)
        assert counter.frame_count > 0
    before = counter.frame_count

    rounded = rounded_logprobs(compiled, PROBE, dtype=torch.bfloat16)

    assert counter.frame_count == before
    assert rounded == pytest.approx(rounded_logprobs(eager, PROBE, dtype=torch.bfloat16), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(rounded, expected, strict=True)) > 1e-3
    assert probe_logprobs(compiled, PROBE) == pytest.approx(expected, abs=1e-5)
    assert counter.frame_count > 0 if not was_compiled else counter.frame_count == before


@pytest.mark.parametrize(("device", "names"), [("cpu", "g\\+\\+"), ("cuda", "clang")])
def test_without_a_compiler_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, names: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)

    with pytest.raises(SettingsError, match=rf"learner\.compile must be false .*{names}"):
        compile_layers([], device)
