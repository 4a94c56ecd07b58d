"""The components of a learner on one rank: wired in `assembly.py`, used by `loop.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from buffer.record.episode import PolicyVersion
from configs.settings import AlgorithmSettings, LearnerSettings, RunSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.resume import StartState
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.training.critic import Critic
from learner.training.guards import Guard
from learner.training.optimizer import ScheduledOptimizer

from .coordinator import Coordinator


class Publisher(Protocol):
    """Publishes new weights to actors; the real ones are in `weights/publish.py`."""

    def publish(
        self, model: nn.Module, version: PolicyVersion, *, free: Callable[[], None]
    ) -> object:
        """Publish the weights and wait for no actor; collective.

        Calls `free` when the model may change again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Components:
    """The components of one rank."""

    run: RunSettings
    learner: LearnerSettings
    algorithm: AlgorithmSettings
    start: StartState
    ranks: Ranks
    coordinator: Coordinator
    policy: Policy
    optimizer: ScheduledOptimizer
    guard: Guard
    checkpoints: Checkpoints
    publisher: Publisher
    reference: Policy | None = None
    """The frozen policy that a KL is taken to."""
    critic: Critic | None = None
    """Values the policy's states, where `algorithm.advantage` needs it."""
