"""Recovery of a store that lost its last seconds: Redis restarted, failed over, or was set back.

    RUNNING --confirm: another run_id--> RECOVERING --recovered--> RUNNING, nothing reaped for a ttl

While RECOVERING, nothing is leased, claimed or reaped; actors may beat, submit, release and fail.
The learner begins a lineage if the store forgot its own, reconciles each batch that it trained
since its checkpoint, restores what the checkpoint holds, advances, commits, and ends the
recovery:

    for k, groups in trained_since_checkpoint:
        store.run(reconcile(lineage, k, groups))
    store.run(restore_committed(lineage, groups_of_checkpoint))
    store.run(advance(lineage, step))
    store.run(commit(lineage, checkpoint_step))
    store.run(recovered(lineage, run_id))

Each may be sent again. `create` finds for itself what the store forgot, and leaves what is
committed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from .operation import Call, Operation, Steps, single, sliced

UNITS_PER_CALL = 32
"""Units of one call; they are seldom more than 16 tasks each."""


def confirm(run_id: str) -> Operation[str]:
    """Compare the server's run_id with the one that the run's data was last confirmed under.

    Returns:
        The run's state: RECOVERING where they differ, NONE where the store has no such run.
    """
    return single("confirm", (run_id,), lambda reply: reply.decode())


def reconcile(
    lineage: int, k: int, group_ids: Sequence[int], *, sealed: bool = True
) -> Operation[int]:
    """Restore the units that batch k was trained on, in order; returns how many had to move.

    Wherever the store has these units and their tasks, they are again in the claim of batch k, and
    what else it has in that claim goes back to the buffer. Their records may be missing. Units that
    are committed are left alone, and so are dead members: the batch was trained without them.
    """
    total = len(group_ids)

    def steps() -> Steps[int]:
        moved = 0
        for first in range(0, max(total, 1), UNITS_PER_CALL):
            part = group_ids[first : first + UNITS_PER_CALL]
            moved += yield Call("reconcile", (lineage, k, total, int(sealed), first, *part))
        return moved

    return Operation("reconcile", steps)


def restore_committed(lineage: int, group_ids: Sequence[int]) -> Operation[int]:
    """Mark units as inside a durable checkpoint; returns how many the store had forgotten.

    Works on states alone: any units may be named, in any order, any number of times.
    """
    rows = [(group,) for group in group_ids]
    return sliced("restore_committed", (lineage,), rows, sum, size=UNITS_PER_CALL)


def recovered(lineage: int, run_id: str) -> Operation[int]:
    """End the recovery under this server; returns the ms for which no lease is reaped.

    Raises:
        StoreRewound: (when run) yet another server has answered since; reconcile again.
    """
    return single("recovered", (lineage, run_id), int)
