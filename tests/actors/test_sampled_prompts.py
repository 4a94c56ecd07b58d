"""Episodes name the item that they answer, where a sampler chose it."""

from __future__ import annotations

import pytest

from actors.engine.engine import Delta
from actors.environments.calculator import Calculator
from actors.environments.calls import drive
from actors.episodes.maker import EpisodeMaker
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.episode import INDEX, PolicyVersion, VersionSpan
from configs.settings import RunSettings
from tests.actors.support.fake_engine import CharacterTokenizer


@pytest.mark.parametrize(("sampler", "named"), [("uniform", None), ("difficulty", "40")])
def test_an_episode_names_the_item_that_a_sampler_chose(sampler: str, named: str | None) -> None:
    run = RunSettings(
        model="init",
        environment="calculator",
        sampler=sampler,
        sampler_prompts=50,
        max_completion_tokens=1,
    )
    maker = EpisodeMaker(CharacterTokenizer(), run, "test")
    spec = TaskSpec(group_id=3, index=40, seed=5, purpose="train", temperature=1.0)
    rollout = drive(maker.begin_episode(Lease(24, 1, spec, 0, ()), Calculator()))
    rollout.append_delta(Delta("", (5,), (-1.0,), (VersionSpan(PolicyVersion(1, 0), 0),), "length"))
    rollout.settle(drive(rollout.judge()))
    assert rollout.score is not None

    episode = maker.episode(rollout, rollout.score, started_at=0.0, finished_at=1.0)

    assert (episode.group_id, episode.metadata.get(INDEX)) == (3, named)
    assert episode.metadata["answer"] == rollout.conversation.answer
