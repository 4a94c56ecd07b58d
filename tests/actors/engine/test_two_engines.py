"""An episode that one engine began is continued by the other: vLLM after ours, and back."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import redis
import torch
from transformers import AutoModelForCausalLM

from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.record.codec import decode_completion, decode_episode, join_completions
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from buffer.store import Store
from console.run.redis_server import free_port
from tests.needs import needs
from tests.system.support.ring_by_hand import RingByHand

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    needs("vLLM"),
]

Span = TypeVar("Span", VersionSpan, FenceRun)

HALF_DONE = 3
"""Episodes with tokens in the store when their actor is killed."""
TOLERANCE = 0.01
"""Nats; after a prefix that lacks its last token some differ by 0.08."""


@pytest.fixture
def ring(redis_url: str, tmp_path: Path) -> Iterator[RingByHand]:
    running = RingByHand(
        tmp_path,
        redis_url,
        f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
        "run.steps=1000",
        "run.max_completion_tokens=200",
        "run.max_policy_lag=8",
        "run.eval_every=0",
        "run.eval_episodes=0",
        "actors.heartbeat_s=0.3",
        "actors.snapshot_s=0.1",
        "broker.lease_timeout_s=3",
        "learner.init_tied=false",
    )
    try:
        yield running
    finally:
        running.close()


def test_what_either_engine_began_the_other_continues(ring: RingByHand) -> None:
    ring.start("broker", "broker")
    learner = ring.start("learner", "learner")

    small = ring.start("small", "actors", "actors.engine=torch")
    vllm = taken_over(ring, small, learner, "small", by=("vllm", "vllm"))
    taken_over(ring, vllm, learner, "vllm", by=("small-again", "torch"))


def taken_over(
    ring: RingByHand,
    actor: subprocess.Popen[bytes],
    learner: subprocess.Popen[bytes],
    name: str,
    *,
    by: tuple[str, str],
) -> subprocess.Popen[bytes]:
    """Kill an actor in mid-episode, and look at what another, by name and engine, makes of it."""
    trained = ring.version()
    ring.until(lambda: ring.version() >= trained + 2, f"{name} feeds the learner")
    begun = killed_in_mid_episode(ring, actor)
    learner.send_signal(signal.SIGSTOP)  # or it would take the records, and make new weights
    other = ring.start(by[0], "actors", f"actors.engine={by[1]}")
    ring.until(lambda: None not in records(ring, begun), f"{by[0]} ends the episodes")

    newest = published(ring)
    for record, stored in zip(records(ring, begun), begun.values(), strict=True):
        assert record is not None
        episode = decode_episode(record)
        assert_continued(episode.completion, stored, (name, by[0]), newest)
        assert_sampled_by_the_model(ring, episode, start=stored.token_ids.size)
    learner.send_signal(signal.SIGCONT)
    return other


def killed_in_mid_episode(
    ring: RingByHand, actor: subprocess.Popen[bytes]
) -> dict[int, Completion]:
    """Kill an actor that is in the middle of episodes; what the store has of them, by task."""
    found: dict[int, Completion] = {}

    def is_half_done() -> bool:
        actor.send_signal(signal.SIGSTOP)
        found.update(unfinished(ring))
        if len(found) >= HALF_DONE:
            return True
        found.clear()
        actor.send_signal(signal.SIGCONT)
        return False

    ring.until(is_half_done, "episodes are half done")
    actor.kill()
    actor.wait()
    return found


def unfinished(ring: RingByHand) -> dict[int, Completion]:
    """Tokens that the store has of leased tasks."""
    with Store(ring.url, ring.settings.run.name) as store:
        leased = [task for task in store.run(operations.inspect()).values() if task.length]
    with redis.Redis.from_url(ring.url) as client:
        prefix = run_prefix(ring.settings.run.name)
        chunks = {t.task_id: client.lrange(f"{prefix}:t:{t.task_id}:p", 0, -1) for t in leased}
    return {
        task_id: join_completions([decode_completion(bytes(chunk)) for chunk in stored])
        for task_id, stored in chunks.items()
        if stored
    }


def records(ring: RingByHand, tasks: Iterable[int]) -> list[bytes | None]:
    with Store(ring.url, ring.settings.run.name) as store:
        return store.run(operations.records([*tasks]))


def published(ring: RingByHand) -> PolicyVersion:
    with Store(ring.url, ring.settings.run.name) as store:
        publication = store.run(operations.publication())
    assert publication is not None
    return publication.version


def assert_continued(
    whole: Completion, stored: Completion, names: tuple[str, str], newest: PolicyVersion
) -> None:
    """The killed actor's tokens are as it stored them, and all others are the next one's."""
    n = stored.token_ids.size
    assert 0 < n < whole.token_ids.size
    assert whole.token_ids[:n].tolist() == stored.token_ids.tolist()
    assert whole.behaviour_logprobs[:n].tolist() == stored.behaviour_logprobs.tolist()
    versions = by_token(whole.versions, whole.token_ids.size)
    makers = by_token(whole.fences, whole.token_ids.size)
    assert versions[:n] == by_token(stored.versions, n)
    assert {span.version for span in versions[n:]} == {newest}
    before, after = names
    assert {run.incarnation.rpartition("-")[0] for run in makers[:n]} == {before}
    assert {run.incarnation.rpartition("-")[0] for run in makers[n:]} == {after}


def by_token(spans: Sequence[Span], size: int) -> list[Span]:
    """Give each token the span that it is in."""
    ends = [*(span.start for span in spans[1:]), size]
    return [span for span, end in zip(spans, ends, strict=True) for _ in range(span.start, end)]


def assert_sampled_by_the_model(ring: RingByHand, episode: Episode, *, start: int) -> None:
    """The other engine's log-probs are those after the tokens before, which it did not make.

    By the initial model, from which training by this rate is still less than the tolerance away.
    """
    model = AutoModelForCausalLM.from_pretrained(ring.settings.run.model_path, dtype=torch.float32)
    tokens = np.concatenate([episode.prompt_ids, episode.completion.token_ids]).astype(np.int64)
    with torch.no_grad():
        log_pi_TV = model(torch.from_numpy(tokens[None])).logits[0].log_softmax(-1)
    first = episode.prompt_ids.size + start
    after = torch.from_numpy(tokens[first:])
    expected = log_pi_TV[first - 1 : -1].gather(1, after[:, None])[:, 0].numpy()
    assert episode.completion.behaviour_logprobs[start:] == pytest.approx(expected, abs=TOLERANCE)
