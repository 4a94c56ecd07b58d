"""Ways of a newcomer through the documents: which pages, and what a machine without a GPU changes.

Nothing is changed in the blocks themselves: the model is one that is made on the spot, since none
is downloaded, and a run is short.
"""

from __future__ import annotations

from typing import NamedTuple

SMALL = (
    "run.model=init",
    "run.steps=3",
    "run.group_size=4",
    "run.groups_per_batch=2",
    "run.max_prompt_tokens=160",
    "run.max_completion_tokens=12",
    "run.eval_episodes=0",
    "actors.count=1",
    "actors.engine=torch",
    "learner.device=cpu",
    "broker.endpoint=tcp://127.0.0.1:0",
)
QUICK = ("up", "mine.yaml", "--plain")


class Journey(NamedTuple):
    """One way."""

    name: str
    pages: tuple[str, ...]
    changes: tuple[str, ...] = SMALL


JOURNEYS = (
    Journey("first-run", ("docs/first-run.md",)),
    Journey("data", ("README.md", "docs/data.md"), (*SMALL, "run.reward=null")),
    Journey("reward", ("README.md", "docs/data.md", "docs/rewards.md")),
    Journey(
        "loss",
        ("README.md", "docs/data.md", "docs/losses.md"),
        (*SMALL, "run.reward=null"),
    ),
    Journey("environment", ("README.md", "docs/environments.md"), (*SMALL, "run.reward=null")),
)
"""Each ends with a run that finishes."""

TOOLS = Journey("tools", ("README.md", "docs/adapters.md"), (*SMALL, "run.reward=null"))
"""Ends with `nyala env test`: a character model has no template for tools."""

AGENT = Journey("agent", ("docs/first-run.md", "docs/agents.md"))
"""The checks before a start of `my_agent.yaml`; the preset trains one."""


def flags(journey: Journey) -> list[str]:
    """Return the changes as arguments."""
    return [word for change in journey.changes for word in ("--set", change)]
