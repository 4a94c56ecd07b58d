"""Inspection of single tasks and an audit of all; nothing is changed.

`audit` reads every live task: it is for fault injection, not for a busy run.
"""

from __future__ import annotations

from collections.abc import Sequence

from .operation import Operation, Reply, single
from .values import TaskSeen

MAX_NAMED = 20  # contradictions of one audit: enough to see the pattern


def inspect(task_ids: Sequence[int] = ()) -> Operation[dict[int, TaskSeen]]:
    """Read the state of these tasks, or of all leased ones; ended tasks are left out.

    A task of a unit that is not begun is ready: it has no fence yet.
    """

    def parse(reply: Reply) -> dict[int, TaskSeen]:
        seen = [
            TaskSeen(int(i), state.decode(), int(fence), inc.decode(), int(length), int(attempts))
            for i, state, fence, inc, length, attempts in reply
        ]
        return {task.task_id: task for task in seen}

    return single("inspect", task_ids, parse)


def audit() -> Operation[list[str]]:
    """Name the live tasks whose own state contradicts the set they are in."""

    def parse(reply: Reply) -> list[str]:
        return [
            f"task {int(task)} is in {place.decode()} and has state {state.decode()}"
            for task, place, state in reply
        ]

    return single("audit", (MAX_NAMED,), parse)
