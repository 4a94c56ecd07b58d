"""State of a learner besides tensors, as a checkpoint's `state.json` holds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import msgspec

from configs.errors import CheckpointError
from learner.model.lora import Adapter
from learner.reporting.metrics import Totals
from learner.training.guards import GuardState

from .folders import STATE

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class LearnerState:
    """The learner's state besides tensors. Producer and consumer: rank 0, of two learners."""

    run: str
    settings_hash: str
    step: int
    """Batches trained."""
    lineage: int
    """Lineage of the learner that wrote the state."""
    cursor: int
    """Next group of the curriculum."""
    trained: tuple[tuple[int, int], ...]
    """Groups of all batches, as ranges [start, end): recovery asserts them."""
    totals: Totals
    guards: GuardState = field(default_factory=GuardState)
    curriculum: str = ""
    """Choices and results of `run.sampler` (`learner/data/sampler.py`); empty if it is uniform."""
    adapter: Adapter | None = None
    """Identity of the adapters whose tensors it has; None = those of the whole model."""

    def encode(self) -> str:
        """Encode the state as JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def decode(cls, text: str) -> LearnerState:
        """Decode a state from JSON.

        Raises:
            CheckpointError: The text is no such state, or one of another schema.
        """
        try:
            schema = msgspec.json.decode(text, type=_Schema).schema
            if schema != SCHEMA:
                raise CheckpointError(
                    f"the checkpoint's schema must be {SCHEMA}, got {schema}; use the release of "
                    "Nyala that wrote it, or begin again with --fresh"
                )
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{STATE} must be a learner's state, got other content ({error}); restore the "
                "checkpoint from a copy, or use another one"
            ) from error


class _Schema(msgspec.Struct):
    """The field that is read first of every state."""

    schema: int
