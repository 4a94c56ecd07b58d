"""`rewards`: changes that the learner makes to the rewards of episodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import NonNegative, Table


class RewardSettings(Table):
    """How an episode's reward is shaped before advantages are computed."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward, by name; parts that are not listed do not count. Empty =
    the reward as the actor gave it.

    Change it when parts of the reward should count differently."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Soft overlong punishment (DAPO): it grows from 0 to `overlong_penalty` over the last so many
    tokens before `run.max_completion_tokens`; 0 = none.

    Raise it when answers grow to the limit."""
    overlong_penalty: NonNegative = 1.0
    """What is taken off the reward of an episode that is as long as it may be.

    Change it when the punishment is too weak or too strong beside your rewards."""
    overlong_filter: bool = False
    """Train no token of an episode that the token limit ended; its reward still counts in its
    group.

    Change it when cut answers are judged unfairly."""
