"""What is done for an actor that can no longer speak for itself."""

from __future__ import annotations

from .operation import Operation, single


def bereave(incarnation: str, *, max_attempts: int) -> Operation[list[int]]:
    """Take back every lease of an incarnation whose process has ended; returns their tasks.

    As `reap` would once they had expired, an attempt included. None unless the run is RUNNING: the
    leases expire then.

    Args:
        incarnation: Who died. What comes in its name under these leases from now on is STALE.
        max_attempts: Attempts without progress that make a task a dead letter.
    """
    arguments = (incarnation, max_attempts)
    return single("bereave", arguments, lambda ids: [int(task) for task in ids])
