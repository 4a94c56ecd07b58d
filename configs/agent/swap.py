"""An agent that swaps two numbers in a memory with its tools, in at most two turns."""

import json
import sys
from threading import Thread
from typing import Any

from openai import BadRequestError, OpenAI

ARGUMENTS = {"get": ["key"], "set": ["key", "value"]}
TOOLS: Any = [
    {"function": {"name": name, "parameters": {"properties": {key: {} for key in keys}}}}
    for name, keys in ARGUMENTS.items()
]
CLIENT = OpenAI(base_url="http://of.each.conversation", api_key="of each conversation")


def use(name: str, arguments: dict[str, Any], memory: dict[str, str]) -> str:
    """Return what a tool says."""
    if sorted(arguments) != ARGUMENTS.get(name) or str(arguments["key"]) not in memory:
        return "error"
    key = str(arguments["key"])
    memory[key] = str(arguments.get("value", memory[key]))
    return memory[key]


def converse(url: str, key: str, task: dict[str, Any]) -> None:
    """Hold one conversation, and reward it."""
    client = CLIENT.with_options(base_url=url, api_key=key)
    memory, num_parallel = dict(task["memory"]), 0
    messages: list[Any] = [{"role": "user", "content": task["task"]}]
    try:
        for _ in range(2):
            answer = client.chat.completions.create(model="nyala", messages=messages, tools=TOOLS)
            messages.append(answer.choices[0].message)
            calls: Any = answer.choices[0].message.tool_calls or []
            said = [use(c.function.name, json.loads(c.function.arguments), memory) for c in calls]
            num_parallel += len(said) > 1 and "error" not in said
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": text}
                for call, text in zip(calls, said, strict=True)
            ]
    except BadRequestError:
        pass  # no room is left for another turn
    exact = float([*memory.values()] == [*task["memory"].values()][::-1])
    body = {"reward": exact, "parts": {"exact": exact, "parallel": num_parallel / 2}, "done": True}
    client.post(url.replace("/v1", "/reward"), cast_to=object, body=body)


for line in sys.stdin:
    Thread(target=converse, kwargs=json.loads(line)).start()
