"""`benchmarks.staleness`: whose episodes are trained on, and the arithmetic of its figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.staleness.__main__ import TASK
from benchmarks.staleness.arms import METHODS, Arms, train
from benchmarks.staleness.lagged_run import LaggedRun
from benchmarks.staleness.report import Point, area, ratios, summarise, table
from benchmarks.support.workload import Workload
from buffer.record.episode import Episode
from learner.algorithm.microbatch import Sequences
from learner.model.policy import TokenScores
from tests.learner.support.tiny_policy import save_tiny_model

LAG = 2
SHORT_RUN = (
    "run.steps=12",
    "run.eval_every=12",
    "run.eval_episodes=4",
    "run.group_size=2",
    "run.groups_per_batch=2",
    "learner.lr=0.05",
    "algorithm.entropy_bonus=1.0",  # changes the weights also where no answer is rewarded
)
CURVES = {
    Point(0, "naive", 0): (0.0, 1.0),
    Point(0, "naive", 1): (0.0, 0.8),
    Point(16, "naive", 0): (0.0, 0.3),
    Point(0, "ppo", 0): (0.0, 1.0),
    Point(16, "ppo", 0): (0.0, 0.6),
    Point(0, "tis", 0): (0.0, 1.0),
    Point(16, "tis", 0): (0.0, 0.5),
}


class WatchedRun(LaggedRun):
    """A lagged run that keeps what it trained on, with the weights of each version."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches: dict[int, Sequence[Episode]] = {}
        self.versions = [self._weights()]

    def _train(self, step, episodes):
        self.batches[step] = episodes
        super()._train(step, episodes)
        self.versions.append(self._weights())

    def logprobs(self, version: int, episode: Episode) -> torch.Tensor:
        """Score a completion with the weights of a version."""
        prompt, completion = episode.prompt_ids.tolist(), episode.completion.token_ids.tolist()
        self._policy.causal_lm.load_state_dict(self.versions[version], strict=False)
        positions = torch.arange(len(prompt), len(prompt) + len(completion))
        with torch.no_grad():
            scores: TokenScores = self._policy(
                Sequences.from_token_ids([prompt + completion]), positions
            )
        return scores.logprobs_N


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staleness")
    save_tiny_model(folder / "model")
    overrides = (*TASK, *SHORT_RUN, f"run.model={folder / 'model'}")
    return Workload("staleness", "demo.yaml", folder, overrides=overrides)


@pytest.fixture(scope="module")
def watched(workload, ranks):
    run = WatchedRun(workload.settings(), lag=LAG, ranks=ranks)
    run.train()
    return run


def test_batch_k_is_sampled_by_the_policy_of_lag_batches_before(watched):
    for step, episodes in watched.batches.items():
        version = max(0, step - 1 - LAG)
        for episode in episodes:
            (span,) = episode.completion.versions
            assert span.version.step == version
            recorded = torch.from_numpy(episode.completion.behaviour_logprobs)
            assert torch.allclose(watched.logprobs(version, episode), recorded, atol=1e-4)


def test_versions_answer_differently(watched):
    episode = watched.batches[5][0]

    assert not torch.allclose(watched.logprobs(2, episode), watched.logprobs(4, episode), atol=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(workload, method, ranks):
    model = workload.folder / "model"

    curve = train(workload, model, Point(LAG, method, 1), ranks=ranks)

    assert len(curve) == 2
    assert all(0 <= accuracy <= 1 for accuracy in curve)


def test_the_area_under_a_curve_is_its_mean_by_trapezia():
    assert area((0.0, 1.0, 1.0)) == pytest.approx(0.75)


def test_ratios_are_of_the_mean_final_accuracies_of_the_best_correction():
    found = ratios(summarise(CURVES))

    assert found["best"] == "ppo"
    assert found["lag16_over_lag0"] == pytest.approx(0.6)
    assert found["corrected_over_naive_lag16"] == pytest.approx(2.0)
    assert found["naive_lag16_over_lag0"] == pytest.approx(0.333)
    assert found["lag256_over_lag0"] is None


def test_the_table_has_mean_and_area_of_every_arm_and_the_spread_of_several_seeds():
    rows = table(summarise(CURVES)).splitlines()

    assert rows[0] == "| | lag 0 | lag 16 |"
    assert rows[2] == "| naive | 0.90 ± 0.14 (0.45) | 0.30 (0.15) |"


def test_a_kept_arm_is_known_again_by_its_settings(tmp_path):
    path, point, curve = tmp_path / "arms.jsonl", Point(16, "ppo", 2), (0.1, 0.9)

    Arms(path, ["run.steps=5"]).keep(point, curve)

    assert Arms(path, ["run.steps=5"]).kept(point) == curve
    assert Arms(path, ["run.steps=6"]).kept(point) is None
    assert Arms(path, ["run.steps=5"]).kept(Point(16, "ppo", 3)) is None
