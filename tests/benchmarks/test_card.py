"""`benchmarks.card`: a stage that fails keeps what it has, and both loops train the same rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.card.__main__ import ratios
from benchmarks.card.beside import IGNORED, LoopBeside
from benchmarks.card.kernels import group_of
from benchmarks.card.launches import WAYS, launches_of
from benchmarks.card.learner import Case, Work
from benchmarks.card.rows import TINY, episodes_of, made_rows
from benchmarks.card.stage import Asked, run_stage
from benchmarks.learner.arm import pack_batch
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from tests.needs import needs
from tests.waiting import wait_until

LONGEST = 64
ROWS = partial(made_rows, tokens=16 * LONGEST, longest=LONGEST, vocabulary=TINY["vocab_size"])
FAILS = """
from benchmarks.card.stage import main

def measure(asked, note):
    note("first", {"tokens_per_s": 1.0})
    raise RuntimeError("the card fell off the bus")

main(measure)
"""
HANGS = """
import json, os, pathlib, signal, subprocess, sys, time

signal.signal(signal.SIGINT, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
child = subprocess.Popen(["sleep", "600"])
(folder / "pids").write_text(f"{os.getpid()} {child.pid}")
(folder / "broken.jsonl").write_text(json.dumps({"first": {"tokens_per_s": 1.0}}) + "\\n")
time.sleep(600)
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Stages of a package that a test makes up."""
    (tmp_path / "made_up").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("benchmarks.card.stage.PACKAGE", "made_up")
    return Asked("cpu", is_tiny=True, model=None, folder=tmp_path)


@pytest.mark.slow
def test_a_stage_that_fails_keeps_what_it_has_measured(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    (asked.folder / "made_up/broken.py").write_text(FAILS)
    said: list[str] = []

    found = run_stage("broken", asked, limit_s=60, say=said.append)

    assert found["first"] == {"tokens_per_s": 1.0}
    assert found["fault"] == "exit code 1"
    assert "the card fell off the bus" in capsys.readouterr().err
    assert any("tokens_per_s 1.0" in line for line in said)


@pytest.mark.slow
def test_a_stage_is_ended_at_its_limit_with_all_that_it_started(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.card.stage.STOP_S", 0.5)  # it does not heed Ctrl-C
    (asked.folder / "made_up/broken.py").write_text(HANGS)

    found = run_stage("broken", asked, limit_s=6, say=lambda _: None)

    assert found["first"] == {"tokens_per_s": 1.0}
    assert found["fault"] == "took longer than 6 s"
    for pid in (asked.folder / "pids").read_text().split():
        wait_until(partial(_is_gone, pid), f"process {pid} was left behind")


def _is_gone(pid: str) -> bool:
    """Whether it has ended; its new parent may not have read that yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_equal_rows_are_whole_and_share_no_prompt() -> None:
    rows = ROWS("equal")

    assert {len(row) for row in rows} == {LONGEST}
    assert len({tuple(row.prompt) for row in rows}) == len(rows) == 16


def test_groups_of_mixed_rows_share_a_prompt() -> None:
    rows = ROWS("mixed")

    prompts = {(row.group, tuple(row.prompt)) for row in rows}
    assert len(prompts) == len({row.group for row in rows}) == len(rows) // 8
    assert max(map(len, rows)) <= LONGEST
    assert len({len(row) for row in rows}) > 2


@pytest.mark.parametrize("kind", ["equal", "mixed"])
def test_the_work_counted_is_what_the_learner_packs(kind: str) -> None:
    rows = ROWS(kind)
    work = Work(Case("", kind, LONGEST * 4, "none", TINY), rows, "cpu", is_profiled=False)

    packed = pack_batch(episodes_of(rows, TINY["vocab_size"]), LONGEST * 64, LONGEST)

    cost = SequenceCost.from_config(TINY)
    adds = sum(
        cost.of_packed(
            m.sequences.lengths, (m.sequences.seen or m.sequences).lengths, m.indices_N.numel()
        )
        for m in packed
    )
    assert work.size() == (sum(sum(m.sequences.lengths) for m in packed), pytest.approx(adds))


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_loop_beside_trains_every_row_once(is_packed: bool) -> None:
    rows = ROWS("mixed")
    loop = LoopBeside(TINY, device="cpu", kept="none")

    batches = loop.cut(rows, LONGEST * 4, packed=is_packed)

    trained = torch.cat([b["input_ids"][_is_real(b, is_packed)] for b in batches])
    expected = np.concatenate([ids for row in rows for ids in (row.prompt, row.ids)])
    assert torch.equal(trained.sort().values, torch.from_numpy(np.sort(expected)).long())
    assert all(b["input_ids"].numel() <= LONGEST * 4 for b in batches)
    for batch in batches:  # a row's first token has nothing before it; padding is not trained
        labels = batch["labels"] if is_packed else batch["labels"][:, 1:]
        wanted = batch["position_ids"] > 0 if is_packed else _is_real(batch, is_packed)[:, 1:]
        assert torch.equal(labels != IGNORED, wanted)


def _is_real(batch: dict[str, torch.Tensor], is_packed: bool) -> torch.Tensor:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    return torch.ones_like(ids, dtype=torch.bool) if is_packed or mask is None else mask > 0


def test_kernels_are_grouped_by_what_they_do() -> None:
    names = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "clip and AdamW",
        "Memcpy DtoD (Device -> Device)": "memcpy",
        "_gate_forward": "elementwise",
        "_norm_backward": "reductions and norms",
    }

    assert {name: group_of(name) for name in names} == names


def test_ratios_are_larger_where_ours_is_faster_than_the_best_of_the_others() -> None:
    def rate(tokens_per_s: float, model: str = "a") -> dict[str, object]:
        return {"tokens_per_s": tokens_per_s, "model": model}

    arms = {
        "learner": {
            "ours_4b_16k": rate(300.0),
            "liger_4b_16k": rate(200.0),
            "ours_4b_mixed": rate(300.0),
            "liger_4b_mixed_padded": rate(150.0),
            "liger_4b_mixed_packed": rate(100.0),
            "ours_0.6b": rate(300.0),
        },
        "engine": {
            "engine": rate(98.0),
            "bare_engine": rate(100.0),
            "engine_short": rate(70.0),
            "bare_engine_short": rate(56.0),
        },
        "ring": {"cold": rate(49.0)},
    }

    assert ratios(arms) == {
        "learner_over_liger_4b_16k": 1.5,
        "learner_over_liger_4b_mixed": 2.0,
        "engine_over_bare_engine": 0.98,
        "engine_short_over_bare_engine": 1.25,
        "ring_over_engine": 0.7,
    }
    arms["ring"] = {"cold": rate(49.0, model="b")}
    assert "ring_over_engine" not in ratios(arms | {"learner": {"fault": "exit code 1"}})


@needs("Triton")
def test_a_layer_launches_a_quarter_of_what_a_plain_one_does(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.learner.arm._ranks", lambda _: ranks)

    first, second = ([launches_of(way, layers=n, chunks=1).counts for way in WAYS] for n in (1, 2))
    plain, ours = (b - a for a, b in zip(first, second, strict=True))

    assert 4 * ours.total() < plain.total()
    for name in ("rsqrt", "mean", "silu", "silu_backward", "slice_backward"):
        assert plain[name] and not ours[name], name
    assert not ours["select_backward"], "gradients of an index are copies"
    copied = sum(ours[name] for name in ("copy_", "_to_copy", "clone"))
    assert 20 * copied < sum(plain[name] for name in ("copy_", "_to_copy", "clone"))
