"""A run with `run.sampler: difficulty` whose learner is killed and whose store is set back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from broker.protocol.messages import TaskSpec
from buffer.record.episode import INDEX, Episode, PolicyVersion
from configs.settings import Settings
from learner.checkpointing.folders import complete_checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.data.sampler import decode_curriculum
from learner.model.ranks import Ranks
from tests.learner.support import ring_in_process
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.rewinding_redis import RewindingRedis, rewinding_redis
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings

PROMPTS, STEPS = 12, 10


def repeatable_settings(folder: Path) -> Settings:
    settings = tiny_settings(
        folder,
        run={
            "max_policy_lag": 0,
            "steps": STEPS,
            "sampler": "difficulty",
            "sampler_prompts": PROMPTS,
        },
        learner={"checkpoint_every": 1},
    )
    run = settings.run.model_copy(update={"deterministic": True})
    return settings.model_copy(update={"run": run})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Group -> the items that its tasks asked, of a run whose answers depend on nothing else.

    The higher the number of a prompt, the later it is answered right.
    """
    seen: dict[int, set[int]] = {}

    def answer(_: object, task_id: int, spec: TaskSpec, *, version: PolicyVersion) -> Episode:
        seen.setdefault(spec.group_id, set()).add(spec.index)
        chance = Random(f"{task_id} {spec.seed} {version.step}").random()
        return replace(
            make_episode(
                task_id,
                group_id=spec.group_id,
                prompt=[10 + spec.index],
                completion=[11 + task_id % 4],
                reward=float(chance < (version.step + 3) / (spec.index + 4)),
                versions=[(version, 0)],
            ),
            metadata={INDEX: str(spec.index)},
        )

    monkeypatch.setattr(ring_in_process.ActorThread, "_answer", answer)
    return seen


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RewindingRedis]:
    with rewinding_redis(tmp_path / "redis") as running:
        yield running


def curriculum_of(settings: Settings) -> str:
    """What the last checkpoint of a run keeps of choices and results."""
    newest = complete_checkpoints(settings.run.folder / "checkpoints")[-1]
    return LearnerState.decode((newest / "state.json").read_text()).curriculum


def shares_of(settings: Settings) -> list[list[float]]:
    text = (settings.run.folder / "metrics.jsonl").read_text()
    kinds = ("unseen", "hard", "medium", "easy", "solved")
    return [[json.loads(line)[f"prompts_{kind}"] for kind in kinds] for line in text.splitlines()]


def test_neither_kills_nor_a_store_that_goes_back_change_what_is_asked(
    server: RewindingRedis, redis_url: str, tmp_path: Path, ranks: Ranks, asked: dict[int, set[int]]
) -> None:
    quiet = RingInProcess(repeatable_settings(tmp_path / "quiet"), redis_url, ranks)
    assert quiet.live()
    undisturbed = dict(asked)
    asked.clear()
    ring = RingInProcess(
        repeatable_settings(tmp_path / "disturbed"), server.url, ranks, patience_s=20.0
    )
    pasts: list[Path] = []

    def nemesis(step: int) -> None:
        pasts.append(server.remember())
        if step in (3, 6):
            server.restart(pasts[-2])
        elif step == 8:
            server.wipe()

    ring.shelf.on_publish = nemesis
    for step in (2, 5, 9):
        ring.shelf.end_life_at = step
        with pytest.raises(LifeEnded):
            ring.live()
    assert ring.live()

    trained = range(2 * STEPS)
    assert {group: asked[group] for group in trained} == {g: undisturbed[g] for g in trained}
    assert all(len(items) == 1 for items in asked.values())
    assert curriculum_of(ring.settings) == curriculum_of(quiet.settings)
    assert shares_of(ring.settings) == shares_of(quiet.settings)


def test_a_run_measures_what_it_trains_and_repeats_what_is_not_solved(
    redis_url: str, tmp_path: Path, ranks: Ranks, asked: dict[int, set[int]]
) -> None:
    settings = repeatable_settings(tmp_path)

    assert RingInProcess(settings, redis_url, ranks).live()

    results = decode_curriculum(curriculum_of(settings)).results[0]
    assert sum(result.groups for result in results.prompts.values()) == 2 * STEPS
    items = [item for group in range(2 * STEPS) for item in asked[group]]
    assert {item: items.count(item) for item in set(items)} == {
        prompt: result.groups for prompt, result in results.prompts.items()
    }
    assert max(items) < PROMPTS
    shares = shares_of(settings)
    assert all(sum(line) == pytest.approx(1.0, abs=1e-3) for line in shares)
    assert shares[0][0] == pytest.approx(10 / 12, abs=1e-4)
