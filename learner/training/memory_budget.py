"""Tokens of a microbatch, halved from the batch on in which a rank ran out of memory.

    out of memory -> memory.json, in the run's folder -> this life ends -> resume, the same batch

A rank that runs out of memory in the middle of a pass leaves the others inside of collectives, and
layers gathered: nothing of it can be taken up again in place. So it is written down, all ranks end,
and the next life resumes at the checkpoint. The budget is a function of the batch alone: batches
before this one are trained as they were, this one and all after it with half of the tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog
import torch

from configs import durable
from configs.errors import CheckpointError, OutOfMemory, SettingsError
from learner.model.ranks import Ranks

log = structlog.get_logger()

FILE = "memory.json"
MOST_HALVINGS = 6
"""To 256 of 16,384 tokens; a microbatch has at least one episode, so less would change nothing."""


class MemoryBudget:
    """The budget of each batch; the same on every rank."""

    def __init__(self, run_folder: Path, tokens: int, ranks: Ranks) -> None:
        """Read what earlier lives wrote down; collective.

        Raises:
            CheckpointError: The file is not what `halve` writes.
        """
        self._file = run_folder / FILE
        self._tokens = tokens
        written = None
        if ranks.is_first:
            written = self._file.read_bytes() if self._file.exists() else b"[]"
        try:
            self._halved = msgspec.json.decode(ranks.broadcast(written), type=list[int])
        except msgspec.MsgspecError as error:
            raise CheckpointError(
                f"{self._file} must list the batches that ran out of memory, got: {error}; "
                "remove it to begin with learner.microbatch_tokens again"
            ) from error

    def tokens(self, step: int) -> int:
        """Return the budget of batch `step`."""
        halvings = sum(batch <= step for batch in self._halved)
        return max(1, self._tokens >> halvings)

    def halve(self, step: int, error: Exception) -> None:
        """Write down that batch `step` ran out of memory, and end this life.

        Several ranks write the same.

        Raises:
            OutOfMemory: The next life has the smaller budget.
            SettingsError: It has been halved too often.
        """
        used = self.tokens(step)
        reason = str(error).splitlines()[0]
        if len(self._halved) >= MOST_HALVINGS:
            raise SettingsError(
                f"batch {step} must fit into memory within {MOST_HALVINGS} halvings of "
                f"learner.microbatch_tokens, got one of {used} tokens that does not; "
                f"lower run.max_completion_tokens, or take more ranks: {reason}"
            ) from error
        durable.replace_file(self._file, msgspec.json.encode([*self._halved, step]))
        raise OutOfMemory(
            f"batch {step} must fit into memory, got none left at microbatches of {used} tokens; "
            f"the next start trains it with {used // 2}: {reason}"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a GPU's or the CPU's allocator raised it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
