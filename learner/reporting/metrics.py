"""What is written down: one line of `metrics.jsonl` for each batch, and the totals of the run.

Owns names and meanings of figures; `journal.py` owns the files. Counts that span a restart live in
`Totals`, which each checkpoint carries.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from buffer.record.episode import Episode
from learner.data.dropped import by_length
from learner.data.policy_lag import token_lags

Figure = float | int | bool | str | dict[str, float] | dict[str, int]


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """What the episodes of a batch say before any forward pass."""

    episodes: int
    groups: int
    prompt_tokens: int
    completion_tokens: int
    """Environment tokens included."""
    trained_tokens: int
    """Tokens with loss mask 1."""
    reward_mean: float
    """Of shaped rewards, as everything here."""
    reward_std: float
    """Over the episodes of the batch."""
    reward_parts: dict[str, float]
    """Mean of each named part."""
    zero_variance_groups: int
    """Groups whose rewards are all equal: they teach nothing."""
    response_length_mean: float
    """Completion tokens per episode."""
    response_length_max: int
    episodes_by_length: dict[str, int]
    """Completion tokens, in buckets -> episodes; `dropped_by_length` has those that were not."""
    response_truncated_fraction: float
    """Share of episodes that the token limit ended."""
    masked_episodes: int
    """Episodes without a trained token: overlong filtering took them out."""
    policy_lag_mean: float
    """Over trained tokens, batches."""
    policy_lag_max: int
    policy_lag_histogram: dict[str, int]
    """Lag -> trained tokens."""
    mixed_version_episodes: int
    """Episodes that more than one policy version wrote."""
    resumed_episodes: int
    """Episodes that one actor began and another continued."""
    episodes_by_actor: dict[str, int]
    """Incarnation that finished the episode -> episodes."""
    reused_groups: int
    """Groups that an earlier batch trained too; every other figure here counts them as well."""
    reused_episodes: int
    reused_tokens: int
    """Their completion tokens: generated for an earlier batch."""
    reused_policy_lag_mean: float
    """Over their trained tokens, batches."""
    reuse_count_max: int
    """How often one of them is now trained again."""


def batch_figures(
    episodes: Sequence[Episode],
    *,
    step: int,
    lineage: int,
    lineages: dict[int, int],
    uses: Mapping[int, int],
) -> BatchFigures:
    """Count what batch `step` is made of.

    Args:
        episodes: All of them.
        step: The batch.
        lineage: The learner's own.
        lineages: lineage -> step it forked at.
        uses: Group that is trained again -> how often, this batch included.
    """
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    lengths = [len(episode.completion.token_ids) for episode in episodes]
    groups: dict[int, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    lags: Counter[int] = Counter()
    reused: list[Episode] = []
    reused_lags: list[int] = []
    for episode in episodes:
        groups[episode.group_id].append(episode.reward)
        for name, value in episode.reward_parts.items():
            parts[name].append(value)
        trained_T = episode.completion.loss_mask.astype(bool)
        lags_T = token_lags(episode, step, lineage, lineages)[trained_T]
        if episode.group_id in uses:
            reused.append(episode)
            reused_lags += lags_T.tolist()
        lags.update(
            dict(zip(*(x.tolist() for x in np.unique(lags_T, return_counts=True)), strict=True))
        )
    trained = sum(lags.values())
    return BatchFigures(
        episodes=len(episodes),
        groups=len(groups),
        prompt_tokens=sum(len(episode.prompt_ids) for episode in episodes),
        completion_tokens=sum(lengths),
        trained_tokens=trained,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_parts={name: float(np.mean(values)) for name, values in sorted(parts.items())},
        zero_variance_groups=sum(1 for values in groups.values() if max(values) == min(values)),
        response_length_mean=float(np.mean(lengths)),
        response_length_max=max(lengths),
        episodes_by_length=dict(by_length(episodes)),
        masked_episodes=sum(1 for e in episodes if not e.completion.loss_mask.any()),
        response_truncated_fraction=float(np.mean([e.finish_reason == "length" for e in episodes])),
        policy_lag_mean=sum(lag * n for lag, n in lags.items()) / trained if trained else 0.0,
        policy_lag_max=max(lags, default=0),
        policy_lag_histogram={str(lag): lags[lag] for lag in sorted(lags)},
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
        reused_policy_lag_mean=float(np.mean(reused_lags)) if reused_lags else 0.0,
        reuse_count_max=max(uses.values(), default=0),
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the wall time of a batch went, seconds."""

    wait_s: float
    """Until the batch was claimed and sealed: the learner was idle."""
    pack_s: float
    """Records to microbatches."""
    weights_s: float
    """Packed, and the weights of the batch before were not handed over yet; their transfer is not
    waited for."""
    train_s: float
    """Forward, backward, optimizer."""


@dataclass(slots=True)
class Totals:
    """Counts over the whole run, all lives of the learner included."""

    episodes: int = 0
    """Those of groups that are trained again are not counted again."""
    reused_episodes: int = 0
    resumed_episodes: int = 0
    trained_tokens: int = 0
    completion_tokens: int = 0
    """Of `episodes`."""
    dropped_tokens: int = 0
    """Completion tokens of episodes that were dropped at claim time."""
    policy_lag_sum: float = 0.0
    """Sum over trained tokens."""
    policy_lag_max: int = 0
    skipped_steps: int = 0
    """Optimizer steps skipped because loss or gradient were not finite."""
    skipped_for_loss: int = 0
    """Those of them whose loss was not finite already."""
    wall_s: float = 0.0
    idle_s: float = 0.0
    """Time waiting for batches, from the moment the first batch of each life was complete."""
    weights_s: float = 0.0
    """Time waiting until weights were handed over, counted as `idle_s` is."""
    busy_span_s: float = 0.0
    """Wall time over which `idle_s` and `weights_s` were counted."""

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
        """Share of the time that went into waiting, once the first batch was there."""
        return self.idle_s / self.busy_span_s if self.busy_span_s else 0.0

    @property
    def policy_lag_mean(self) -> float:
        """Over all trained tokens, batches."""
        return self.policy_lag_sum / self.trained_tokens if self.trained_tokens else 0.0

    @classmethod
    def from_json(cls, saved: dict[str, float | int]) -> Totals:
        """Read what a checkpoint holds; figures that it lacks start from zero."""
        known = {field.name for field in fields(cls)}
        figures: dict[str, Any] = {name: value for name, value in saved.items() if name in known}
        return cls(**figures)
