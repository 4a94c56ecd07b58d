"""A live agent with OpenAI's client: several turns with a pause before each, then one reward.

    python talking_agent.py LEDGER

Appends a line to the ledger when it begins, after each turn, and when it has ended.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import openai
from openai.types.chat import ChatCompletionMessageParam

ROOM = 48  # tokens of a turn
WORK_S = 1.0  # longest pause before a call
SHARES = 1024  # a reward is a multiple of 1/1024, which float32 keeps exactly


def note(conversation: str, **facts: object) -> None:
    """Append a line to the ledger."""
    with Path(sys.argv[1]).open("a") as ledger:
        ledger.write(json.dumps({"conversation": conversation, **facts}) + "\n")


def main() -> None:
    """Hold one conversation."""
    address = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    name = address.rpartition("/")[2]
    rng = random.Random(name)
    note(name, begun=os.getpid())
    client = openai.OpenAI()
    task = json.loads(os.environ["NYALA_TASK"])["task"]
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task}]
    for _ in range(rng.randint(3, 7)):
        time.sleep(rng.uniform(0.0, WORK_S))
        answer = client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=ROOM,
            extra_body={"return_token_ids": True},
        )
        choice = answer.choices[0]
        prompt = answer.model_extra["prompt_token_ids"] if answer.model_extra else None
        tokens = choice.model_extra["token_ids"] if choice.model_extra else None
        note(name, prompt=prompt, tokens=tokens)
        messages += [
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": rng.choice("abc")},
        ]
    reward = rng.randrange(SHARES) / SHARES
    client.with_options(base_url=address).post("/reward", cast_to=object, body={"reward": reward})
    note(name, reward=reward)


if __name__ == "__main__":
    main()
