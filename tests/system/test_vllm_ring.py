"""The whole ring with real vLLM: actor and learner agree to the last digits after every swap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.needs import needs
from tests.system.support.live_run import LiveRun, assert_nothing_lost_or_repeated

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]

STEPS = 10
SYNCHRONOUS = (
    f"run.steps={STEPS}",
    "run.max_policy_lag=0",
    "run.temperature=0.7",
    "run.max_completion_tokens=24",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "actors.engine=vllm",
    "learner.init_tied=false",
    "learner.lr=1e-3",
    "learner.warm_start_steps=0",
    "learner.checkpoint_every=5",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A finished run of ten batches, each sampled from weights swapped in just before."""
    run = LiveRun(tmp_path_factory.mktemp("vllm"), "tiny.yaml", *SYNCHRONOUS)
    with run.up() as process:
        run.finish(process)
    return run


def test_ratio_is_one_for_tokens_of_the_learners_own_version(run: LiveRun) -> None:
    for line in run.lines("metrics"):
        assert line["policy_lag_max"] == 0
        assert line["lag0_tokens"] == line["trained_tokens"] > 0
        assert line["lag0_ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert line["lag0_logprob_diff_max"] < 1e-4


def test_every_task_of_a_vllm_run_has_one_end(run: LiveRun) -> None:
    summary = run.summary()

    assert summary["learner_lives"] == 1
    assert summary["tasks_dead"] == 0
    assert_nothing_lost_or_repeated(run, summary)


def test_trained_model_loads_in_transformers_and_vllm(run: LiveRun) -> None:
    token_ids = tuple(range(5, 17))

    logprobs = asyncio.run(probe_in_vllm(run.folder / "model", token_ids))

    model = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    with torch.no_grad():
        log_pi_TV = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    expected = log_pi_TV[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert "library_name: transformers" in (run.folder / "model" / "README.md").read_text()


async def probe_in_vllm(model: Path, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    engine = vllm_engine(VllmOptions(str(model), max_model_len=64, max_concurrent=4))
    await engine.start()
    try:
        return await engine.probe(token_ids)
    finally:
        await engine.close()
