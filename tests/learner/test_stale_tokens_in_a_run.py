"""Whole runs whose longest answers take more versions than the lag bound allows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from broker.protocol.codec import decode_spec
from buffer import operations
from buffer.operations.values import SubmitLine
from buffer.record.codec import encode_episode
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from configs.settings import Settings
from console.run.run_folder import RunFolder
from console.verbs.replay import compared
from learner.data.batch import BatchPlan
from learner.model.ranks import Ranks
from learner.replay import replay_on
from tests.learner.support import ring_in_process
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.ring_in_process import ActorThread, LifeEnded, RingInProcess
from tests.learner.support.tiny_run import LEASE_MS, tiny_settings

MAX_LAG, GROUP = 2, 4
LONGEST, A_VERSION, TAIL = 20, 4, 0.15
"""Tokens of a long answer, those that it grows by in a version, and the share of such answers."""
PATIENCE = 20  # looks after which it grows without a new version: all groups may wait for one


@dataclass
class Growing:
    """An answer that is being made."""

    task_id: int
    fence: int
    group_id: int
    prompt: int
    length: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    """One for each token."""

    def spans(self) -> Iterator[tuple[PolicyVersion, int]]:
        before = None
        for place, version in enumerate(self.versions):
            if version != before:
                yield version, place
            before = version


class TailedActor(ActorThread):
    """Answers with one token, or now and then with twenty, over as many versions as come."""

    made: dict[int, list[PolicyVersion]]
    """Version of each token, by task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: list[Growing] = []
        self._grown_at: PolicyVersion | None = None
        self._looks = 0

    def _act(self, version: PolicyVersion) -> int:
        lease = self._store.run(operations.lease("actor", ttl_ms=LEASE_MS, n=1000, version=version))
        for task in lease.tasks:
            spec = decode_spec(task.spec)
            is_long = Random(task.task_id).random() < TAIL
            prompt = ring_in_process.FIRST_TOKEN + spec.index % ring_in_process.NUM_ITEMS
            length = LONGEST if is_long else 1
            self._held.append(Growing(task.task_id, task.fence, spec.group_id, prompt, length))
        self._looks += 1
        may_grow = version != self._grown_at or self._looks > PATIENCE
        for answer in self._held:
            if may_grow or answer.length == 1:
                self._grow(answer, version)
        if may_grow:
            self._grown_at, self._looks = version, 0
        return self._submit()

    def _grow(self, answer: Growing, version: PolicyVersion) -> None:
        assert self._shelf.model is not None
        for _ in range(min(A_VERSION, answer.length - len(answer.tokens))):
            text = torch.tensor([[answer.prompt, *answer.tokens]])
            log_mu = self._shelf.model(text).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(log_mu.exp(), 1))
            answer.tokens.append(token)
            answer.logprobs.append(min(0.0, float(log_mu[token])))
            answer.versions.append(version)

    def _submit(self) -> int:
        ended = [answer for answer in self._held if len(answer.tokens) == answer.length]
        self._held = [answer for answer in self._held if len(answer.tokens) < answer.length]
        lines = []
        for answer in ended:
            self.made[answer.task_id] = answer.versions
            episode = make_episode(
                answer.task_id,
                group_id=answer.group_id,
                prompt=[answer.prompt],
                completion=answer.tokens,
                logprobs=answer.logprobs,
                reward=float(answer.tokens[-1] % 4 == answer.prompt % 4),
                versions=list(answer.spans()),
            )
            lines.append(SubmitLine(answer.task_id, answer.fence, encode_episode(episode)))
        self._store.run(operations.submit(lines))
        return len(lines)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[PolicyVersion]]:
    """The tokens that the actor of the ring has made."""
    TailedActor.made = {}
    monkeypatch.setattr(ring_in_process, "ActorThread", TailedActor)
    return TailedActor.made


def settings_of(folder: Path, on_stale: str, *, steps: int) -> Settings:
    run = {"steps": steps, "max_policy_lag": MAX_LAG, "max_completion_tokens": LONGEST}
    learner = {"checkpoint_every": 4, "lr": 1e-2, "keep_batches": steps}
    return tiny_settings(folder, run=run, learner=learner, buffer={"on_stale": on_stale})


def lines_of(settings: Settings, name: str) -> list[dict[str, Any]]:
    text = (settings.run.folder / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def dropped_in(settings: Settings, url: str) -> dict[str, int]:
    with Store(url, settings.run.name) as store:
        return store.run(operations.stats()).dropped


def test_all_fresh_tokens_are_trained_and_no_episode_is_dropped_for_its_age(
    redis_url: str, tmp_path: Path, ranks: Ranks, made: dict[int, list[PolicyVersion]]
) -> None:
    settings = settings_of(tmp_path, "mask", steps=12)

    assert RingInProcess(settings, redis_url, ranks).live()

    assert dropped_in(settings, redis_url) == {}
    num_stale = 0
    for batch, row in zip(
        lines_of(settings, "batches"), lines_of(settings, "metrics"), strict=True
    ):
        tasks = [g * GROUP + member for g in batch["group_ids"] for member in range(GROUP)]
        lags = [row["step"] - 1 - version.step for task in tasks for version in made[task]]
        num_fresh = sum(lag <= MAX_LAG for lag in lags)
        assert (row["trained_tokens"], row["stale_masked_tokens"]) == (
            num_fresh,
            len(lags) - num_fresh,
        )
        assert row["fresh_trained_fraction"] == 1.0
        assert row["policy_lag_max"] <= MAX_LAG
        num_stale += len(lags) - num_fresh
    assert num_stale > LONGEST, "the run has stale tokens"
    summary = json.loads((settings.run.folder / "summary.json").read_text())
    assert summary["stale_masked_tokens"] == num_stale
    assert summary["fresh_trained_fraction"] == 1.0 > summary["sampled_trained_fraction"]


def test_dropping_leaves_fresh_tokens_of_the_same_answers_untrained(
    redis_url: str, tmp_path: Path, ranks: Ranks, made: dict[int, list[PolicyVersion]]
) -> None:
    settings = settings_of(tmp_path, "drop", steps=12)

    assert RingInProcess(settings, redis_url, ranks).live()

    assert dropped_in(settings, redis_url)["stale"] > 0
    assert made
    summary = json.loads((settings.run.folder / "summary.json").read_text())
    assert summary["stale_masked_tokens"] == 0
    assert summary["sampled_trained_fraction"] < summary["fresh_trained_fraction"] < 1.0


def test_a_killed_learner_masks_the_same_tokens_again(
    redis_url: str,
    tmp_path: Path,
    ranks: Ranks,
    made: dict[int, list[PolicyVersion]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[BatchPlan] = []
    encode = BatchPlan.encode

    def sent(plan: BatchPlan) -> bytes:
        plans.append(plan)
        return encode(plan)

    monkeypatch.setattr(BatchPlan, "encode", sent)
    settings = settings_of(tmp_path, "mask", steps=8)
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 7  # the checkpoint is of step 4: versions 5 and 6 are abandoned
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    before, after = (ring.shelf.history[PolicyVersion(lineage, 7)] for lineage in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert made
    rows = lines_of(settings, "metrics")
    assert [row["is_replay"] for row in rows][:7] == [False] * 4 + [True] * 3
    first, again = ([plan for plan in plans if plan.step == 7][i] for i in (0, 1))
    assert first.mask is not None and first == again
    assert (first.mask.lineage, first.mask.max_lag) == (1, MAX_LAG)


def test_a_replay_masks_the_same_tokens_in_all_lives_of_the_learner(
    redis_url: str, tmp_path: Path, ranks: Ranks, made: dict[int, list[PolicyVersion]]
) -> None:
    settings = settings_of(tmp_path, "mask", steps=8)
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 7
    with pytest.raises(LifeEnded):
        ring.live()
    assert ring.live()
    changes = {"name": "again", "model": settings.run.model_path}
    again = settings.model_copy(update={"run": settings.run.model_copy(update=changes)})

    assert replay_on(ranks, again, settings.run.folder, 8, threading.Event())

    result = compared(RunFolder(settings.run.folder), RunFolder(again.run.folder))
    assert result.title.startswith("8 batches")
    assert not result.rows
    assert made
    assert sum(row["stale_masked_tokens"] for row in lines_of(settings, "metrics")) > 0
