"""A teacher of a real ring is killed in mid-score, and another one joins."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch
from transformers import AutoModelForCausalLM

from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.operations.values import Stats
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from buffer.sampling import why_nobody_samples
from buffer.store import Store
from configs.errors import StoreError
from console.run.redis_server import free_port
from tests.system.support.ring_by_hand import RingByHand, assert_one_history

STEPS = 24
TEMPERATURE = 0.8
LEASE_S = 3
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture
def ring(redis_url: str, tmp_path: Path) -> Iterator[RingByHand]:
    """Whose teacher is the model that the policy begins with; records stay until the end."""
    running = RingByHand(
        tmp_path,
        redis_url,
        f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
        f"broker.lease_timeout_s={LEASE_S}",
        "actors.heartbeat_s=0.3",
        "actors.engine=torch",
        f"run.steps={STEPS}",
        f"run.temperature={TEMPERATURE}",
        "run.eval_every=0",
        "run.eval_episodes=0",
        f"learner.checkpoint_every={STEPS}",
        f"algorithm.teacher={tmp_path / 'first' / 'tiny' / 'init'}",
        "algorithm.teacher_in=actor",
    )
    try:
        yield running
    finally:
        running.close()


def test_every_episode_is_scored_once_whoever_dies(ring: RingByHand) -> None:
    ring.start("broker", "broker")
    ring.start("learner", "learner")
    ring.start("actor-0", "actors")
    first = ring.start("teacher-1", "actors", teacher="teacher")
    ring.until(lambda: ring.version() >= 2, "the run trains")

    first.send_signal(signal.SIGSTOP)  # it waits for work, and is granted some
    ring.until(lambda: stats(ring).scoring, "a stopped teacher holds leases")
    first.kill()
    first.wait()
    ring.until(lambda: not stats(ring).scoring, "its leases expire", 10 * LEASE_S)
    told = "no process of their teacher, teacher, was heard"
    ring.until(lambda: told in str(missing(ring)), "its absence is noticed")
    ring.start("teacher-2", "actors", teacher="teacher")
    ring.until(lambda: told not in str(missing(ring)), "the second teacher is heard")
    stood_at = ring.version()
    ring.until(lambda: ring.version() >= stood_at + 3, "the run trains again")

    check_scores(ring)
    ring.until(lambda: stats(ring).state == "ENDED", "the run ends")
    assert_one_history(ring, STEPS, "first")
    scored = {name: joined(ring, name) for name in ("teacher-1", "teacher-2")}
    assert all(count > 0 for count in scored.values()), scored


def stats(ring: RingByHand) -> Stats:
    with Store(ring.url, ring.settings.run.name) as store:
        return store.run(operations.stats())


def missing(ring: RingByHand) -> str | None:
    """What people are told while nobody scores."""
    with Store(ring.url, ring.settings.run.name) as store:
        try:
            return why_nobody_samples(
                store.run(operations.stats()),
                store.run(operations.actors()),
                store.run(operations.memory()),
                store.run(operations.closed()),
                folder="runs/tiny",
                heartbeat_timeout_s=ring.settings.broker.heartbeat_timeout_s,
                pause_at_memory=1.0,
                max_run_bytes=None,
            )
        except StoreError:
            return None


def joined(ring: RingByHand, name: str) -> int:
    return sum(line.get("stage") == "scoring" for line in ring.log(name))


def check_scores(ring: RingByHand) -> None:
    """What is complete or in a batch has the log-probs of the model, at the run's temperature."""
    client, prefix = redis.Redis.from_url(ring.url), run_prefix(ring.settings.run.name)
    held = {*client.smembers(f"{prefix}:claimed"), *client.smembers(f"{prefix}:done")}
    tasks = sorted(map(int, held))
    with Store(ring.url, ring.settings.run.name) as store:
        records = store.run(operations.records(tasks))
    episodes = [decode_episode(record) for record in records if record is not None]
    model = AutoModelForCausalLM.from_pretrained(str(ring.settings.algorithm.teacher))
    assert len(episodes) > 50
    for episode in episodes:
        scores = episode.completion.teacher_logprobs
        assert scores is not None, f"task {episode.task_id} has no score"
        difference = torch.tensor(scores) - reference(model, episode)
        assert difference.abs().max() < 1e-4, f"task {episode.task_id} has other scores"


@torch.no_grad()
def reference(model: torch.nn.Module, episode: Episode) -> torch.Tensor:
    """Shape [T]."""
    num_prompt = len(episode.prompt_ids)
    ids = torch.tensor([[*episode.prompt_ids.tolist(), *episode.completion.token_ids.tolist()]])
    logprobs = (model(ids).logits[0].float() / TEMPERATURE).log_softmax(-1)[num_prompt - 1 : -1]
    scores: torch.Tensor = logprobs.gather(-1, ids[0, num_prompt:, None]).squeeze(-1)
    return scores.mul(torch.tensor(episode.completion.loss_mask))
