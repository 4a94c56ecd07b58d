"""The episode record, which an actor makes and the learner trains on.

Producer: `actors` (whole records, and chunks of unfinished ones). Consumer: `learner`.
Owns the record's parts; `codec.py` turns them into bytes. Loads without redis and torch.

Shapes: P prompt tokens, T completion tokens (all turns, environment tokens included).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

SCHEMA = 1

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


class PolicyVersion(NamedTuple):
    """Version of the weights: `step` batches trained in `lineage`. Orders by lineage, then step."""

    lineage: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    step: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    """Batches trained; -1, as for the lineage, before the first version."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From token `start` on (until the next span), tokens were sampled from `version`."""

    version: PolicyVersion
    start: int


@dataclass(frozen=True, slots=True)
class FenceRun:
    """From token `start` on (until the next run), `incarnation` made tokens under `fence`."""

    fence: int
    incarnation: str
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The tokens after the prompt, finished or not. A chunk of a snapshot is a completion too."""

    token_ids: Int32
    """Sampled and environment tokens. Shape [T]."""
    behaviour_logprobs: Float32
    """log mu of the distribution sampled from, nats; 0 on environment tokens. Shape [T]."""
    loss_mask: UInt8
    """1 on sampled tokens, 0 on tokens that the environment wrote. Shape [T]."""
    versions: tuple[VersionSpan, ...]
    """Starts ascend from 0; empty iff T = 0."""
    fences: tuple[FenceRun, ...]
    """Starts ascend from 0 and fences never decrease; empty iff T = 0."""

    @property
    def num_trained(self) -> int:
        """Count the tokens with loss mask 1."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One prompt with one finished completion and its reward."""

    task_id: int
    group_id: int
    purpose: str
    """`train` or `eval`."""
    prompt_ids: Int32
    """Shape [P]."""
    completion: Completion
    reward: float
    reward_parts: dict[str, float]
    """Named parts of the reward, such as `exact`."""
    finish_reason: str
    """`stop`, `length` or `environment`."""
    environment_metrics: dict[str, float]
    incarnation: str
    """Incarnation of the actor that submitted it."""
    started_at: float
    """Unix seconds at which its first lease began generating."""
    finished_at: float
    metadata: dict[str, str] = field(default_factory=dict)
    """Small free-form strings for people, such as the answer's text."""
