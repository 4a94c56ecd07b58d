"""Tasks of live agents: `environment: agent`.

    run:
      environment: agent
      environment_settings: {path: tasks.jsonl, prompt: task}

Rows are those of `dataset` (`dataset/environment.py`), with the same settings. The agent is told
its row as JSON; what it then asks, and hears, is up to it (`actors/episodes/agent_rollout.py`). Its
reward is what it posts, or that of reward functions, or the comparison of its last turn with the
row's answer. `demonstration` names a function that shows how a conversation goes, for the
supervised start of a model that `run.model: init` makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from actors.chat import GivenPrompt
from broker.protocol.conversation_messages import MAX_PAYLOAD
from configs.errors import SettingsError, quoted
from configs.user_code import explain, load_user_code

from .base import Score, Segment, Step
from .dataset.environment import Dataset, DatasetConversation

DEMONSTRATION = "run.environment_settings.demonstration"
Demonstrate = Callable[..., Any]
"""Gets the columns of a row as keywords, and returns `{"messages": [...], "tools": [...]}`."""


class AgentTask:
    """One row, for one agent."""

    def __init__(self, row: DatasetConversation, demonstrate: Demonstrate | None = None) -> None:
        """Write the row as JSON.

        Raises:
            SettingsError: It is too long.
        """
        self._row = row
        self._demonstrate = demonstrate
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
        """None: what the agent will ask is known to `demonstrated_chat` at most."""
        return ()

    def demonstrated_chat(self) -> dict[str, list[Any]] | None:
        """Return messages and tools of a conversation about this row; None = none is shown.

        Raises:
            SettingsError: The function fails, or returns something else.
        """
        if self._demonstrate is None:
            return None
        try:
            chat = self._demonstrate(**self.columns)
        except Exception as error:
            raise SettingsError(
                f"{DEMONSTRATION} must return a chat without an error, got {explain(error)}; mend "
                "the function, whose keywords are the columns of a row"
            ) from error
        if not isinstance(chat, dict) or not _are_mappings(chat.get("messages")):
            raise SettingsError(
                f"{DEMONSTRATION} must return {{'messages': [...], 'tools': [...]}}, got "
                f"{quoted(chat, 60)}; return messages as the agent sends and gets them"
            )
        return {"messages": list(chat["messages"]), "tools": list(chat.get("tools") or ())}

    def step(self, text: str) -> Step:
        """Take the policy's last turn as the answer."""
        return self._row.step(text)

    def score(self) -> Score:
        """Compare it with the reference."""
        return self._row.score()


class Agent:
    """Rows for live agents, split into training and held-out ones."""

    is_thread_safe = True

    def __init__(self, *, demonstration: str | None = None, **settings: Any) -> None:
        self.rows = Dataset(**settings)
        self._demonstrate: Demonstrate | None = None
        if demonstration is not None:
            self._demonstrate = load_user_code(
                demonstration, setting=DEMONSTRATION, kind="function"
            )

    def begin(self, index: int, seed: int, *, held_out: bool) -> AgentTask:
        """Make the task of an item."""
        row = self.rows.begin(index, seed, held_out=held_out)
        return AgentTask(row, self._demonstrate)

    def describe(self) -> str:
        """Return settings and numbers of rows."""
        return f"agent, {self.rows.describe()}"


def _are_mappings(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(part, Mapping) for part in messages)
