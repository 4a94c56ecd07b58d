"""`agents`: the processes that hold conversations of a run by themselves, started by a host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Seconds, SettingsTable

HostAndPort = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+):\d{1,5}$")]


class AgentSettings(SettingsTable):
    """The processes that hold conversations of a run, where `run.environment` is `agent`."""

    command: str | tuple[str, ...] | None = None
    """Command of an agent, as a list of words or as a text that is split as a shell splits it, such
    as `python my_agent.py`. It is started once for each conversation, in an empty folder, without a
    shell, by a host that `nyala up` starts; null = agents are started by hand (`nyala agents RUN
    --print`).

    Set it to the command of your agent."""
    serves_many: bool = False
    """Whether the command is started once and holds all conversations of its host: each is a line
    of its standard input, JSON with `url`, `key` and `task`, and ends when the agent posts
    `{"done": true}`. Such conversations share limits of memory, and one crash ends them all.

    Set it when the start of your agent, such as its imports, takes longer than a conversation."""
    requirements: tuple[str, ...] = ()
    """Packages of the command, in pip's form, in a virtual environment of its own, which uv makes
    on each machine; `python` in the command is then the Python of that environment.

    Change it when your agent needs packages that are not installed here."""
    python: str | None = None
    """Python of a virtual environment of yours for the command, in place of one with
    `requirements`.

    Change it when you keep such a virtual environment yourself."""
    max_conversations: Annotated[int, Field(ge=1, le=4096)] = 8
    """Most agents that one host runs at a time; a message of the broker names at most 4096.

    Raise it when the actors wait for agents and the host's machine is idle."""
    timeout_s: Seconds = 1800.0
    """Longest time of a conversation, after which its agent is ended.

    Raise it when correct conversations take longer."""
    memory_mb: Annotated[int, Field(ge=16)] | None = 4096
    """Most resident memory of an agent with all its processes (Linux), MiB, measured once a second;
    null = no limit.

    Change it to what a host's machine has for each of its agents."""
    listen: HostAndPort = "127.0.0.1:0"
    """Address at which a host listens for its agents; port 0 = a free one. What travels there is
    not encrypted.

    Change it when agents run in containers, or on another machine of a network that you trust."""
