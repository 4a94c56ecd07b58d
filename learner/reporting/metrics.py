"""Figures of a batch, its times, and the totals of the run.

`figures.py` has what each figure means, `journal.py` the files. Counts that span a restart are in
`Totals`, which each checkpoint carries.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from buffer.record.episode import Episode
from learner.data.grades import mean_parts
from learner.data.group_filter import by_length
from learner.data.policy_lag import FreshTokens, trained_lags
from learner.profiling import TRAINING, PhaseMeasurements


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of a batch's episodes, before any forward pass; `figures.py` explains each."""

    episodes: int
    groups: int
    prompt_tokens: int
    completion_tokens: int
    trained_tokens: int
    reward_mean: float
    reward_std: float
    reward_parts: dict[str, float]
    zero_variance_groups: int
    response_length_mean: float
    response_length_max: int
    episodes_by_length: dict[str, int]
    response_truncated_fraction: float
    masked_episodes: int
    policy_lag_mean: float
    policy_lag_max: int
    policy_lag_histogram: dict[str, int]
    mixed_version_episodes: int
    resumed_episodes: int
    episodes_by_actor: dict[str, int]
    reused_groups: int
    reused_episodes: int
    reused_tokens: int
    reused_policy_lag_mean: float
    reuse_count_max: int


def batch_figures(
    episodes: Sequence[Episode],
    *,
    step: int,
    lineage: int,
    lineages: dict[int, int],
    uses: Mapping[int, int],
) -> BatchFigures:
    """Count the contents of batch `step`.

    Args:
        episodes: All episodes of the batch, at least one.
        step: The batch.
        lineage: The learner's own.
        lineages: lineage -> step it forked at.
        uses: Group that is trained again -> how often, this batch included.
    """
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    lengths = [len(episode.completion.token_ids) for episode in episodes]
    reused = [episode for episode in episodes if episode.group_id in uses]
    lags_N = trained_lags(episodes, step, lineage, lineages)
    reused_lags_N = trained_lags(reused, step, lineage, lineages)
    return BatchFigures(
        episodes=len(episodes),
        groups=len({episode.group_id for episode in episodes}),
        prompt_tokens=sum(len(episode.prompt_ids) for episode in episodes),
        completion_tokens=sum(lengths),
        trained_tokens=len(lags_N),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_parts=mean_parts([episode.reward_parts for episode in episodes]),
        zero_variance_groups=_zero_variance_groups(episodes),
        response_length_mean=float(np.mean(lengths)),
        response_length_max=max(lengths),
        episodes_by_length=dict(by_length(episodes)),
        response_truncated_fraction=float(np.mean([e.finish_reason == "length" for e in episodes])),
        masked_episodes=sum(1 for e in episodes if not e.completion.loss_mask.any()),
        policy_lag_mean=float(lags_N.mean()) if len(lags_N) else 0.0,
        policy_lag_max=int(lags_N.max(initial=0)),
        policy_lag_histogram={
            str(lag): count for lag, count in sorted(Counter(lags_N.tolist()).items())
        },
        mixed_version_episodes=sum(
            1 for e in episodes if len({span.version for span in e.completion.versions}) > 1
        ),
        resumed_episodes=sum(
            1 for e in episodes if len({run.incarnation for run in e.completion.fences}) > 1
        ),
        episodes_by_actor=dict(Counter(episode.incarnation for episode in episodes)),
        reused_groups=len(uses),
        reused_episodes=len(reused),
        reused_tokens=sum(len(episode.completion.token_ids) for episode in reused),
        reused_policy_lag_mean=float(reused_lags_N.mean()) if len(reused_lags_N) else 0.0,
        reuse_count_max=max(uses.values(), default=0),
    )


def environment_figures(
    episodes: Sequence[Episode], environment_of: Callable[[int], str]
) -> dict[str, dict[str, float]]:
    """Count the contents of a batch by environment.

    Args:
        episodes: All episodes of the batch.
        environment_of: Names the environment of a group.

    Returns:
        Name of an environment -> `episodes`, `groups`, `zero_variance_groups`, `reward_mean`, and
        `accuracy`, the mean of the reward's part `exact`, where it has one.
    """
    by_name: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_name[environment_of(episode.group_id)].append(episode)
    return {name: _figures_of(by_name[name]) for name in sorted(by_name)}


def _figures_of(episodes: Sequence[Episode]) -> dict[str, float]:
    figures: dict[str, float] = {
        "episodes": len(episodes),
        "groups": len({episode.group_id for episode in episodes}),
        "zero_variance_groups": _zero_variance_groups(episodes),
        "reward_mean": float(np.mean([episode.reward for episode in episodes])),
    }
    exact = [e.reward_parts["exact"] for e in episodes if "exact" in e.reward_parts]
    return figures | ({"accuracy": float(np.mean(exact))} if exact else {})


def _zero_variance_groups(episodes: Sequence[Episode]) -> int:
    rewards: dict[int, set[float]] = defaultdict(set)
    for episode in episodes:
        rewards[episode.group_id].add(episode.reward)
    return sum(1 for values in rewards.values() if len(values) == 1)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a batch on rank 0, from the end of the previous batch to that of its last step."""

    measured: PhaseMeasurements
    mfu: float | None
    peak_tflops: float | None

    def figures(self, *, trained_tokens: int) -> dict[str, object]:
        """Return the times by their names in `metrics.jsonl`."""
        seconds = self.measured.seconds
        spent_s = seconds["prepare"] + sum(seconds[name] for name in TRAINING)
        return {
            **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
            "peak_gib": self.measured.peak_gib,
            "trained_tokens_per_s": round(trained_tokens / spent_s, 1) if spent_s else None,
            "mfu": self.mfu,
            "peak_tflops": self.peak_tflops,
        }


@dataclass(slots=True)
class Totals:
    """Counts over the whole run, in all lives of the learner."""

    episodes: int = 0
    """Episodes of groups that are trained again count once."""
    reused_episodes: int = 0
    resumed_episodes: int = 0
    trained_tokens: int = 0
    completion_tokens: int = 0
    """Completion tokens of `episodes`."""
    dropped_tokens: int = 0
    """Completion tokens of episodes that were dropped at claim time."""
    policy_lag_sum: float = 0.0
    """Sum of the policy lag over trained tokens."""
    policy_lag_max: int = 0
    fresh_tokens: FreshTokens = field(default_factory=FreshTokens)
    """Tokens of the groups of all batches, and of those dropped as stale."""
    skipped_steps: int = 0
    """Optimizer steps skipped because loss or gradient were not finite."""
    skipped_for_loss: int = 0
    """Skipped steps whose loss was not finite."""
    wall_s: float = 0.0
    idle_s: float = 0.0
    """Time waiting for batches, from the moment when the first batch of each life was complete."""
    weights_s: float = 0.0
    """Time that training waited until weights were gathered, counted from the same moment."""
    busy_span_s: float = 0.0
    """Wall time over which `idle_s` and `weights_s` were counted."""
    actor_s: float = 0.0
    """Time of all actors together, from when each was first heard of."""

    def add(self, figures: BatchFigures, *, skipped: int, skipped_for_loss: int = 0) -> None:
        """Count one trained batch."""
        self.episodes += figures.episodes - figures.reused_episodes
        self.reused_episodes += figures.reused_episodes
        self.resumed_episodes += figures.resumed_episodes
        self.trained_tokens += figures.trained_tokens
        self.completion_tokens += figures.completion_tokens - figures.reused_tokens
        self.policy_lag_sum += figures.policy_lag_mean * figures.trained_tokens
        self.policy_lag_max = max(self.policy_lag_max, figures.policy_lag_max)
        self.skipped_steps += skipped
        self.skipped_for_loss += skipped_for_loss

    @property
    def idle_fraction(self) -> float:
        """Share of time spent waiting for batches, from the first batch of each life on."""
        return self.idle_s / self.busy_span_s if self.busy_span_s else 0.0

    @property
    def policy_lag_mean(self) -> float:
        """Mean policy lag over all trained tokens, batches."""
        return self.policy_lag_sum / self.trained_tokens if self.trained_tokens else 0.0
