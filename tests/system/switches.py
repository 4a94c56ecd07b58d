"""The demo with each switch of the learner that a CPU has.

Run beside CI, `pytest -s -q tests/system/switches.py`. What a switch may change is stated here:
recomputed activations change no bit of a repeatable run. The others take sums in another order, so
their tokens differ soon; the learner's log-probs must still be those of the engine, which computes
them by itself, and the demo must learn as without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.support.live_run import TORCH, LiveRun
from tests.system.support.repeated_run import curve, weights

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PATIENCE_S = 900.0
REPEATABLE = (
    *TORCH,
    "run.deterministic=true",
    "run.max_policy_lag=0",
    "run.steps=4",
    "run.eval_every=0",
    "actors.count=2",
    "actors.max_concurrent_episodes=1",
    "learner.device=cpu",
    "learner.checkpoint_every=1",
)
LEARNING = (*TORCH, "run.steps=60", "actors.kv_on_swap=recompute", "learner.device=cpu")
ROUNDING = 1e-4  # nats, of a log-prob in float32 by two programs
KEPT = {
    "selective": ("learner.activation_checkpointing=selective",),
    "full": ("learner.activation_checkpointing=full",),
}
REORDERED = {
    "none": (),
    "compile": ("learner.compile=true",),
    "two threads": ("learner.threads=2",),
    "two ranks": ("learner.ranks=2",),
    "sequence of two": ("learner.ranks=2", "parallel.sequence=2"),
    "tensor of two": ("learner.ranks=2", "parallel.tensor=2"),
    "compile and full": ("learner.compile=true", "learner.activation_checkpointing=full"),
}


def finished(folder: Path, *overrides: str) -> LiveRun:
    """The demo, run to its end."""
    folder.mkdir()
    run = LiveRun(folder, "demo.yaml", *overrides)
    with run.up() as process:
        run.finish(process, within_s=PATIENCE_S)
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Curve and weights of the repeatable demo that keeps all activations."""
    folder = tmp_path_factory.mktemp("switches") / "plain"
    run = finished(folder, *REPEATABLE, "learner.activation_checkpointing=none")
    return curve(run), weights(run)


@pytest.mark.parametrize("name", KEPT)
def test_recomputed_activations_change_no_bit(
    plain: tuple[list[dict[str, Any]], str], tmp_path: Path, name: str
) -> None:
    run = finished(tmp_path / "run", *REPEATABLE, *KEPT[name])

    assert (curve(run), weights(run)) == plain


@pytest.mark.parametrize("name", REORDERED)
def test_a_switch_that_reorders_sums_trains_the_same_policy(tmp_path: Path, name: str) -> None:
    run = finished(tmp_path / "run", *LEARNING, *REORDERED[name])

    lines = run.lines("metrics")
    furthest = max(line["lag0_logprob_diff_max"] for line in lines)
    before, *_, after = (line["accuracy"] for line in run.lines("eval"))
    print(f"\n{name}: within {furthest:.1e} nats, held out {before:.3f} to {after:.3f}")
    assert sum(line["lag0_tokens"] for line in lines) > 0
    assert furthest < ROUNDING
    assert after > before + 0.3
