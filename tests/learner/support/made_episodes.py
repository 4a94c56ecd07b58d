"""Episodes made up for tests: any prompt, completion, reward and version."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from broker.protocol.messages import TaskSpec
from buffer.record.episode import (
    Branch,
    Completion,
    Episode,
    FenceRun,
    PolicyVersion,
    VersionSpan,
)

FIRST = PolicyVersion(1, 0)


def make_episode(
    task_id: int = 0,
    *,
    group_id: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    completion: Sequence[int] = (8, 9),
    logprobs: Sequence[float] | None = None,
    mask: Sequence[int] | None = None,
    reward: float = 0.0,
    versions: Sequence[tuple[PolicyVersion, int]] = ((FIRST, 0),),
    finish_reason: str = "stop",
    purpose: str = "train",
    branches: Sequence[tuple[int, int | None]] = (),
) -> Episode:
    """Make an episode; by default all its tokens were sampled with probability 1/e."""
    mask = [1] * len(completion) if mask is None else list(mask)
    if logprobs is None:
        logprobs = [-1.0 if sampled else 0.0 for sampled in mask]
    return Episode(
        task_id=task_id,
        group_id=group_id,
        purpose=purpose,
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion=Completion(
            token_ids=np.array(completion, dtype=np.int32),
            behaviour_logprobs=np.array(logprobs, dtype=np.float32),
            loss_mask=np.array(mask, dtype=np.uint8),
            versions=tuple(VersionSpan(version, start) for version, start in versions),
            fences=(FenceRun(1, "actor", 0),),
            branches=tuple(Branch(*branch) for branch in branches),
        ),
        reward=reward,
        reward_parts={"exact": float(reward == 1.0)},
        finish_reason=finish_reason,
        environment_metrics={},
        incarnation="actor",
        started_at=0.0,
        finished_at=1.0,
    )


def answers_at(version: PolicyVersion) -> Callable[[int, TaskSpec], Episode]:
    """Return how an actor at a version answers tasks: every second one right."""

    def answer(task_id: int, spec: TaskSpec) -> Episode:
        return make_episode(
            task_id,
            group_id=spec.group_id,
            reward=float(task_id % 2),
            versions=[(version, 0)],
            purpose=spec.purpose,
        )

    return answer


def num_tokens(episode: Episode) -> int:
    """Count prompt and completion tokens of an episode."""
    return len(episode.prompt_ids) + len(episode.completion.token_ids)


def random_group_episodes(num_groups: int, group_size: int, *, seed: int = 0) -> list[Episode]:
    """Make groups of episodes of different lengths over the tokens 3..19, with random rewards.

    Those of a group have one prompt.
    """
    random = np.random.default_rng(seed)
    episodes = []
    prompt: list[int] = []
    for task_id in range(num_groups * group_size):
        length = int(random.integers(1, 9))
        drawn = random.integers(3, 20, size=random.integers(1, 6)).tolist()
        prompt = drawn if task_id % group_size == 0 else prompt
        episodes.append(
            make_episode(
                task_id,
                group_id=task_id // group_size,
                prompt=prompt,
                completion=random.integers(3, 20, size=length).tolist(),
                logprobs=random.uniform(-4, -2, size=length).tolist(),
                mask=[1, *random.integers(0, 2, size=length - 1).tolist()],
                reward=float(random.uniform()),
            )
        )
    return episodes
