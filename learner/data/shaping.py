"""From the reward that an actor gave to the one that is trained on.

    reward = sum of weight x part (or the actor's own) + overlong punishment

A pure function of one record and the settings: every rank shapes what it reads, and a replayed
batch is shaped alike. Shaped episodes are episodes: nothing after this knows of shaping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from buffer.record.episode import Episode
from configs.errors import SettingsError
from configs.settings import RewardSettings, Settings

OVERLONG = "overlong"
"""The punishment's name among the parts of a reward."""


def shape(episode: Episode, settings: Settings) -> Episode:
    """Weigh the parts of a reward, punish length, and mask what was cut off.

    Args:
        episode: As the actor made it.
        settings: Of the run: its table `rewards`, and the longest completion.
    """
    rewards, limit = settings.rewards, settings.run.max_completion_tokens
    reward, parts, completion = episode.reward, episode.reward_parts, episode.completion
    if rewards.weights:
        reward = sum(weight * parts.get(name, 0.0) for name, weight in rewards.weights.items())
    if buffer := rewards.overlong_buffer_tokens:
        punishment = rewards.overlong_penalty * overlong(len(completion.token_ids), limit, buffer)
        reward += punishment
        parts = parts | {OVERLONG: punishment}
    if rewards.overlong_filter and episode.finish_reason == "length":
        completion = replace(completion, loss_mask=np.zeros_like(completion.loss_mask))
    return replace(episode, reward=reward, reward_parts=parts, completion=completion)


def overlong(length: int, limit: int, buffer: int) -> float:
    """Punish a completion for its length, before the limit does.

    0 up to limit - buffer tokens, then (limit - buffer - length) / buffer, -1 from the limit on.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13.
    """
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def check_weights(episodes: Iterable[Episode], settings: RewardSettings) -> None:
    """Refuse a weight of something that no episode of a batch was given.

    A part that only some episodes have counts 0 in the others.

    Raises:
        SettingsError: Probably a misspelt name: training without that part would go on for days.
    """
    known = {name for episode in episodes for name in episode.reward_parts}
    for name in settings.weights:
        if name not in known:
            raise SettingsError(
                f"rewards.weights must name parts of the reward, got {name!r}; "
                f"episodes of this run have {', '.join(sorted(known)) or 'none'}"
            )
