"""Published weights: names, order, bytes and digest, by one rank and by two with FSDP2."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from broker.protocol.manifest import digest_of
from learner.weights.gather import gather
from learner.weights.layout import layout
from tests.learner.support.forks import FORKS
from tests.weights.support.toy_model import PROBE_IDS, ToyModel, probe_logprobs

pytestmark = pytest.mark.slow

SEED = 7
DTYPES = ("float32", "bfloat16")


def published_bytes(model: nn.Module, dtype: str, *, rank: int = 0) -> bytes:
    specs = layout(model, dtype)
    memory = mmap.mmap(-1, specs[-1].offset + specs[-1].num_bytes) if rank == 0 else None
    gather(model, specs, memory)
    return memory[:] if memory is not None else b""


def toy() -> ToyModel:
    model = ToyModel(ballast=1001)  # odd, so that two ranks have unequal shards
    model.step(SEED)
    return model


def one_of_two_ranks(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = toy()
    fully_shard(model)
    for dtype in DTYPES:
        (folder / f"{dtype}-{rank}").write_bytes(published_bytes(model, dtype, rank=rank))
    logprobs = probe_logprobs(model, PROBE_IDS)
    (folder / f"again-{rank}").write_bytes(published_bytes(model, "float32", rank=rank))
    (folder / f"logprobs-{rank}").write_text(",".join(map(repr, logprobs)))
    torch.distributed.destroy_process_group()


def digest(contents: bytes) -> str:
    return digest_of([contents])


def test_two_ranks_publish_the_bytes_and_the_probe_of_one(tmp_path):
    ranks = [FORKS.Process(target=one_of_two_ranks, args=(rank, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(150)
        assert process.exitcode == 0

    for dtype in DTYPES:
        alone = published_bytes(toy(), dtype)
        assert digest((tmp_path / f"{dtype}-0").read_bytes()) == digest(alone)
    after_a_forward_pass = (tmp_path / "again-0").read_bytes()
    assert digest(after_a_forward_pass) == digest(published_bytes(toy(), "float32"))
    for rank in (0, 1):
        theirs = [float(text) for text in (tmp_path / f"logprobs-{rank}").read_text().split(",")]
        assert theirs == pytest.approx(probe_logprobs(toy(), PROBE_IDS), abs=1e-6)


def test_the_wire_form_is_what_the_manifest_says():
    model = toy()
    specs = layout(model, "bfloat16")
    wire = bytearray(published_bytes(model, "bfloat16"))

    assert [spec.name for spec in specs] == ["ballast", "embed.weight", "mix.weight", "mix.bias"]
    assert [spec.offset for spec in specs] == [0, 2002, 3026, 3538]
    for spec in specs:
        values = torch.frombuffer(
            wire, dtype=torch.bfloat16, count=spec.num_bytes // 2, offset=spec.offset
        )
        expected = model.get_parameter(spec.name).detach().to(torch.bfloat16)
        assert torch.equal(values.view(spec.shape), expected)


def test_a_tied_output_layer_is_published_once_and_an_untied_one_as_itself():
    tied, untied = ToyModel(), ToyModel()
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())

    assert "lm_head.weight" not in {spec.name for spec in layout(tied, "float32")}
    assert "lm_head.weight" in {spec.name for spec in layout(untied, "float32")}


def test_names_are_those_that_actors_know_also_when_torch_wraps_the_model():
    compiled = nn.Module()  # what torch.compile makes of a model, without waiting for a compiler
    compiled._orig_mod = ToyModel()

    assert layout(compiled, "float32") == layout(ToyModel(), "float32")
