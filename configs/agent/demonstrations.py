"""Conversations that the supervised start imitates: some call tools in parallel, some do not."""

from random import Random
from typing import Any

AT_ONCE = 0.4  # of the conversations
CHOICE = Random(0)  # a task that comes again may be shown in the other way


def chat(task: str, memory: dict[str, str]) -> dict[str, Any]:
    """Return a conversation that swaps the two numbers of a memory."""
    gets = [("get", {"key": key}, value) for key, value in memory.items()]
    first, second = memory
    sets = [
        ("set", {"key": first, "value": memory[second]}, memory[second]),
        ("set", {"key": second, "value": memory[first]}, memory[first]),
    ]
    turns = [gets, sets] if CHOICE.random() < AT_ONCE else [[call] for call in (*gets, *sets)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for calls in turns:
        functions = [{"name": name, "arguments": arguments} for name, arguments, _ in calls]
        messages.append(
            {"role": "assistant", "tool_calls": [{"function": function} for function in functions]}
        )
        messages += [{"role": "tool", "content": value} for *_, value in calls]
    return {"messages": messages[: -len(turns[-1])], "tools": TOOLS}


def _tool(name: str, *keys: str) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {} for key in keys}
    return {"function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [_tool("get", "key"), _tool("set", "key", "value")]
