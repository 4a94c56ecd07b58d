"""An agent whose conversations are episodes of verifiers: its tasksets, harnesses and rewards.

    python play_verifiers.py verifiers.toml         hold conversations, for `agents.serves_many`
    python play_verifiers.py verifiers.toml 1000    print the first 1000 tasks as rows

Runs in a Python that has verifiers. The file has verifiers' own tables `env`, `client` and
`sampling`; tasksets of yours are looked up beside it.
"""

import asyncio
import json
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]
from openai import AsyncOpenAI, BadRequestError, OpenAIError

OUT_OF_ROOM = "context_length_exceeded"  # Nyala's answer where run.max_completion_tokens is used up
DOOR = AsyncOpenAI(api_key="of each conversation", max_retries=10)


def outcome(env: Any, episode: Any) -> dict[str, Any]:
    """Return the reward of an episode with its parts, or why verifiers could not play it.

    Agents of verifiers that are trained share one conversation, and its reward is their mean. An
    episode that has run out of room has the rewards that it has got until then.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    texts = [f"{error.type}: {error.message}" for error in errors]
    if not env.complete(episode) and OUT_OF_ROOM not in str(texts):
        return {"error": "; ".join(texts) or "its episode is not complete"}
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    parts: dict[str, float] = {}
    for trace in trained:
        for name, reward in trace.rewards.items():
            if reward is not None:
                parts[name] = parts.get(name, 0.0) + reward.value / len(trained)
    return {"reward": sum(parts.values()), "parts": parts, "done": True}


async def episode_of(env: Any, settings: dict[str, Any], told: dict[str, Any]) -> Any:
    """Play the episode of a task at the door of its conversation."""
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type()(**told["task"]["task"]), env.config.taskset.task)
    endpoint = {"base_url": told["url"], "headers": {"Authorization": f"Bearer {told['key']}"}}
    context = vf.ModelContext(
        model="nyala",
        client=vf.TrainClientConfig(**settings["client"], **endpoint),
        sampling=vf.SamplingConfig(**settings.get("sampling", {})),
    )
    (slot,) = env.slots(task)
    return await env.run_slot(slot, context)


async def converse(env: Any, settings: dict[str, Any], told: dict[str, Any]) -> None:
    """Play one episode, and end its conversation; no other is touched by what it raises."""
    try:
        body = outcome(env, await episode_of(env, settings, told))
    except Exception as error:  # noqa: BLE001 - of a taskset, a harness or a reward
        body = {"error": repr(error)}
    reward, door = told["url"].replace("/v1", "/reward"), DOOR.with_options(api_key=told["key"])
    with suppress(OpenAIError):  # the conversation is over, or its host is
        try:
            await door.post(reward, cast_to=object, body=body)
        except (BadRequestError, ValueError) as error:  # the reward is no number
            await door.post(reward, cast_to=object, body={"error": str(error)})


async def play(env: Any, settings: dict[str, Any]) -> None:
    """Hold conversations, each a line of the input, until it ends."""
    async with env.serving(), asyncio.TaskGroup() as conversations:
        while line := await asyncio.to_thread(sys.stdin.readline):
            conversations.create_task(converse(env, settings, json.loads(line)))


def show_tasks(env: Any, count: int) -> None:
    """Print tasks, a line of JSON each."""
    with redirect_stdout(sys.stderr):  # tasksets may print what they fetch
        tasks = list(env.taskset.take(count))
    for task in tasks:
        name = task.data.name or f"{env.config.taskset.id} {task.data.idx}"
        told = task.data.model_dump(mode="json", exclude_defaults=True)
        sys.stdout.write(json.dumps({"name": name, "task": told}) + "\n")


if __name__ == "__main__":
    path, *counts = sys.argv[1:]
    sys.path[0] = str(Path(path).parent)
    settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    env = vf.load_environment(vf.resolve_env_config(settings["env"]))
    if counts:
        show_tasks(env, int(counts[0]))
    else:
        asyncio.run(play(env, settings))
