"""What a life of the learner is made of, put together in `assembly.py` and used by `loop.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from buffer.record.episode import PolicyVersion
from configs.settings import Settings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.resume import StartState
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.training.critic import Critic
from learner.training.optimizer import AdamWithSchedule


class Publisher(Protocol):
    """Where new weights go; `publish.py` has the real one."""

    def publish(
        self, model: nn.Module, version: PolicyVersion, *, free: Callable[[], None]
    ) -> object:
        """Hand the weights over and wait for no actor; every rank calls it.

        Calls `free` when the model may change again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Components:
    """What a life of the learner is made of, on every rank."""

    settings: Settings
    ranks: Ranks
    store: RetryingStore
    policy: Policy
    optimizer: AdamWithSchedule
    checkpoints: Checkpoints
    publisher: Publisher
    start: StartState
    ledger: Ledger | None
    """On rank 0."""
    reference: Policy | None = None
    """The frozen policy that a KL is taken to."""
    critic: Critic | None = None
    """What values the policy's states, where `algorithm.advantage` asks for it."""
