"""Tasks of live agents: `environment: agent`.

    run:
      environment: agent
      environment_settings: {path: tasks.jsonl, prompt: task}

Rows are those of `dataset` (`dataset/environment.py`), with the same settings. The agent is told
its row as JSON; what it then asks, and hears, is up to it (`actors/episodes/agent_rollout.py`). Its
reward is what it posts, or that of reward functions, or the comparison of its last turn with the
row's answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from actors.chat import GivenPrompt
from broker.protocol.conversation_messages import MAX_PAYLOAD
from configs.errors import SettingsError

from .base import Score, Segment, Step
from .dataset.environment import Dataset, DatasetConversation


class AgentTask:
    """One row, for one agent."""

    def __init__(self, row: DatasetConversation) -> None:
        """Write the row as JSON.

        Raises:
            SettingsError: It is too long.
        """
        self._row = row
        self.payload = json.dumps(row.columns, ensure_ascii=False, default=str).encode()
        if len(self.payload) > MAX_PAYLOAD:
            raise SettingsError(
                f"a row for an agent must be at most {MAX_PAYLOAD} bytes of JSON, got "
                f"{len(self.payload)} in one of run.environment_settings.path; leave columns out, "
                "or put long ones where agents can fetch them"
            )

    @property
    def prompt(self) -> GivenPrompt:
        """The question of the row; what the policy gets is up to the agent."""
        return self._row.prompt

    @property
    def answer(self) -> str | None:
        """The reference answer, if the rows have one."""
        return self._row.answer

    @property
    def columns(self) -> Mapping[str, Any]:
        """All columns of the row."""
        return self._row.columns

    @property
    def demonstration(self) -> tuple[Segment, ...]:
        """None: nobody knows what the agent will ask."""
        return ()

    def step(self, text: str) -> Step:
        """Take the policy's last turn as the answer."""
        return self._row.step(text)

    def score(self) -> Score:
        """Compare it with the reference."""
        return self._row.score()


class Agent:
    """Rows for live agents, split into training and held-out ones."""

    is_thread_safe = True

    def __init__(self, **settings: Any) -> None:
        self.rows = Dataset(**settings)

    def begin(self, index: int, seed: int, *, held_out: bool) -> AgentTask:
        """Make the task of an item."""
        return AgentTask(self.rows.begin(index, seed, held_out=held_out))

    def describe(self) -> str:
        """Return settings and numbers of rows."""
        return f"agent, {self.rows.describe()}"
