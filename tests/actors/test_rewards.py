"""Reward functions of users: recognised, checked, and kept from harming all but their sample."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import time
from typing import Any

import pytest

from actors.chat import ChatMessage
from actors.environments.registry import check_environment
from actors.rewards.functions import (
    Convention,
    RewardSample,
    call_batch,
    call_sample,
    recognise,
)
from actors.rewards.pool import check_reward
from actors.rewards.process import RewardProcess
from actors.rewards.worker import serve
from configs.child import as_frame, read_frame
from configs.errors import RewardError, SettingsError
from configs.settings import RunSettings, Settings
from tests.waiting import until

GOOD = {
    "batch": "def f(prompts, completions, **kwargs): return [len(c) for c in completions]",
    "batch_async": "async def f(completions, **kw): return [float(len(c)) for c in completions]",
    "batch_columns": (
        "def f(prompts, completions, completion_ids, answer, index, **kwargs):\n"
        "    assert completion_ids == [[1, 2]] * len(prompts) and answer[0] == 'ba'\n"
        "    return [len(c) for c in completions]"
    ),
    "batch_array": (
        "import numpy as np\ndef f(completions): return np.array([len(c) for c in completions])"
    ),
    "output_prompt": "def f(output, prompt): return len(output)",
    "completion_answer": "def f(completion, answer): return len(completion) * (answer == 'ba')",
    "sample_async": "async def f(completion, answer, **kwargs): return len(completion)",
    "batch_dataset": (
        "def f(completions, solution, level, **kwargs):\n"
        "    assert (solution, level) == (['ba'] * len(completions), [2] * len(completions))\n"
        "    return [len(c) for c in completions]"
    ),
    "openrlhf": (
        "def f(queries, prompts, labels):\n"
        "    assert labels == ['ba'] * len(queries)\n"
        "    return {'rewards': [len(q) - len(p) for q, p in zip(queries, prompts)], 'scores': 0}"
    ),
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (ground_truth, extra_info['level']) == ('ba', 2)\n"
        "    return {'score': len(solution_str), 'acc': 1}"
    ),
    "verl_row": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, ground_truth) == ('my/sums', 'ba')\n"
        "    own = {'split': 'test', 'index': 9, 'level': 3}\n"
        "    assert extra_info == own | {'num_turns': 2, 'rollout_reward_scores': {}}, extra_info\n"
        "    return {'score': len(solution_str)}"
    ),
    "areal": (
        "def f(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):\n"
        "    assert (prompt_ids, completion_ids, kwargs['solution']) == ([7], [1, 2], 'ba')\n"
        "    return len(completions)"
    ),
    "prints": "print('hi')\ndef f(output, prompt):\n    print('hello')\n    return len(output)",
}


VERL_ROW = {
    "data_source": "my/sums",
    "reward_model": {"style": "rule", "ground_truth": "ba"},
    "extra_info": {"split": "test", "index": 9, "level": 3},
}


def sample(completion: str, **columns: object) -> RewardSample:
    return RewardSample(
        "ab>",
        (7,),
        completion,
        (1, 2),
        "ba",
        3,
        "train",
        0.5,
        columns or {"solution": "ba", "level": 2},
        (ChatMessage("assistant", completion),),
    )


def score(path, completions, *, timeout_s=20.0, name="f", **columns):
    async def run():
        process = RewardProcess(f"{path}:{name}", timeout_s=timeout_s)
        await process.start()
        try:
            samples = [sample(c, **columns) for c in completions]
            return await process.score(samples), process.num_restarts
        finally:
            await process.close()

    return asyncio.run(run())


@pytest.fixture
def write(tmp_path):
    def write(source: str):
        path = tmp_path / "reward.py"
        path.write_text(source)
        return path

    return write


@pytest.mark.parametrize("form", GOOD)
def test_each_form_of_function_is_recognised_and_called(write, form):
    columns = VERL_ROW if form == "verl_row" else {}

    results, restarts = score(write(GOOD[form]), ["b", "ba", "bab"], **columns)

    assert (results, restarts) == ([1.0, 2.0, 3.0], 0)


def given(source, reference, /, **columns):
    """What a function that returns what it got was given."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    one = dataclasses.replace(sample("15", **columns), answer=reference)
    is_batch = recognise(scope["f"], "f") is Convention.BATCH
    return call_batch(scope["f"], [one]) if is_batch else call_sample(scope["f"], one)


@pytest.mark.parametrize("reference", [15, {"target": ["15", "fifteen"]}, "15", ["15"]])
def test_a_ground_truth_arrives_as_the_row_of_verl_has_it(reference):
    source = "def f(data_source, solution_str, ground_truth): return ground_truth"
    row = {"reward_model": {"style": "rule", "ground_truth": reference}}
    is_plain = isinstance(reference, (int, str))

    assert given(source, str(reference) if is_plain else None, **row) == reference
    assert given(source, "another", **row) == "another"  # the settings name another column


def test_a_column_keeps_its_type_and_comes_before_a_name_of_ours():
    own = {"answer": 15, "index": 7, "purpose": "maths", "environment_reward": [1]}
    names = ", ".join(own)
    batch = f"def f(completions, {names}): return [{names}]"
    one = f"def f(completion, {names}): return [{names}]"

    assert given(batch, "15", **own) == [[value] for value in own.values()]
    assert given(one, "15", **own) == ["15", 7, "maths", [1]]
    assert given(batch, "15", level=1) == [["15"], [3], ["train"], [0.5]]
    assert given(batch, "#### 15", **own)[0] == ["#### 15"]


def test_extra_info_of_other_rows_has_their_columns():
    source = "def f(solution_str, ground_truth, extra_info): return extra_info"

    got = given(source, "15", level=2)

    ours = {"index": 3, "split": "train", "num_turns": 2, "rollout_reward_scores": {}}
    assert got == {"level": 2} | ours


def test_a_module_is_found_by_name(write, monkeypatch, tmp_path):
    (tmp_path / "my_rewards.py").write_text(GOOD["batch"])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")

    assert score("my_rewards", ["ba"]) == ([2.0], 0)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("float('nan')", "finite, got nan"),
        ("float('inf')", "finite, got inf"),
        ("'1'", "must be a float, got '1'"),
        ("1 / 0", "ZeroDivisionError: division by zero, at "),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        (
            "def g(c): return {value} if c == 'bad' else 1.0\n"
            "def f(completions, **kw): return [g(c) for c in completions]"
        ),
        "def f(completion, answer): return {value} if completion == 'bad' else 1.0",
    ],
)
def test_a_bad_value_costs_only_its_sample(write, form, value, reason):
    results, restarts = score(write(form.format(value=value)), ["a", "bad", "c"])

    assert (results[0], results[2], restarts) == (1.0, 1.0, 0)
    assert isinstance(results[1], RewardError)
    assert reason in str(results[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("threading.Event().wait()", "run.reward_timeout_s = 0.3 s"),
        ("os.kill(os.getpid(), 11)", "the end of its process with status -11"),
        ("os._exit(3)", "the end of its process with status 3"),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        (
            "def f(completions, **kw):\n    if 'bad' in completions: {harm}\n"
            "    return [1.0 for _ in completions]"
        ),
        "def f(completion, answer):\n    if completion == 'bad': {harm}\n    return 1.0",
    ],
)
def test_a_hang_or_crash_costs_only_its_sample(write, form, harm, reason):
    path = write("import os, threading\n" + form.format(harm=harm))

    results, restarts = score(path, ["a", "b", "bad", "c"], timeout_s=0.3)

    assert [r for r in results if not isinstance(r, RewardError)] == [1.0, 1.0, 1.0]
    assert reason in str(results[2])
    assert restarts >= 1


@pytest.mark.slow
def test_a_function_that_always_hangs_gives_up_the_batch_in_bounded_time(write):
    path = write("import threading\ndef f(completion, answer): threading.Event().wait()")
    begun = time.monotonic()

    results, _ = score(path, ["a"] * 64, timeout_s=0.2)

    assert all(isinstance(r, RewardError) for r in results)
    assert "got 4 calls in one batch that hung" in str(results[-1])
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        (None, "f", "run.reward must be an existing file, got .*; there is no /"),
        ("def g(output, prompt): return 1", "f", "run.reward must be a function of .*it has g"),
        ("def f(output, prompt) return 1", "f", "can be imported, got .*SyntaxError"),
        ("import no_such_thing", "f", "can be imported, got .*No module named 'no_such_thing'"),
        ("def f(a, b): return 1", "f", r"must be of the form .*with \(a, b\); give"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_with_the_fix(tmp_path, source, name, words):
    path = tmp_path / "reward.py"
    if source is not None:
        path.write_text(source)

    with pytest.raises(SettingsError, match=f"(?s){words}"):
        score(path, ["a"], name=name)


@pytest.mark.parametrize("form", ["completion, reference", "completions, reference"])
def test_a_column_that_is_not_there_is_named(write, form):
    results, _ = score(write(f"def f({form}): return 1"), ["a"])

    assert "must be one of answer, " in str(results[0])
    assert "got 'reference'" in str(results[0])
    assert "solution" in str(results[0])


ASYNC = {
    "a limit": (
        "limit = asyncio.Semaphore(2)\n"
        "async def f(completions, **kw):\n"
        "    async def one(text):\n"
        "        async with limit:\n"
        "            await asyncio.sleep(0.01)\n"
        "            return float(len(text))\n"
        "    return await asyncio.gather(*map(one, completions))"
    ),
    "a task that works between calls": (
        "pending, task = asyncio.Queue(), None\n"
        "async def answer():\n"
        "    while True:\n"
        "        text, reply = await pending.get()\n"
        "        reply.set_result(float(len(text)))\n"
        "async def f(completions, **kw):\n"
        "    global task\n"
        "    loop = asyncio.get_running_loop()\n"
        "    task = task or loop.create_task(answer())\n"
        "    replies = [loop.create_future() for _ in completions]\n"
        "    for each in zip(completions, replies): pending.put_nowait(each)\n"
        "    return await asyncio.gather(*replies)"
    ),
    "one sample at a time that meets the others": (
        "met, all_there = 0, asyncio.Event()\n"
        "async def f(completion, answer):\n"
        "    global met\n"
        "    met += 1\n"
        "    if met % 4 == 0: all_there.set()\n"
        "    await all_there.wait()\n"
        "    return float(len(completion))"
    ),
}


@pytest.mark.parametrize("form", ASYNC)
def test_an_async_function_has_one_loop_in_all_calls(write, form, capfd):
    path = write(f"import asyncio\n{ASYNC[form]}")

    async def run():
        process = RewardProcess(f"{path}:f", timeout_s=20)
        await process.start()
        try:
            batch = [sample("a" * n) for n in range(4)]
            return [await process.score(batch) for _ in range(3)], process.num_restarts
        finally:
            await process.close()

    assert asyncio.run(run()) == ([[0.0, 1.0, 2.0, 3.0]] * 3, 0)
    assert "one by one" not in capfd.readouterr().err


def test_what_an_async_function_began_goes_on_between_calls(write, tmp_path):
    done = tmp_path / "done"
    path = write(
        "import asyncio, pathlib\n"
        "tasks = []\n"
        "async def later():\n"
        "    await asyncio.sleep(0)\n"
        f"    pathlib.Path({str(done)!r}).touch()\n"
        "async def f(completion):\n"
        "    tasks.append(asyncio.create_task(later()))\n"
        "    return 1.0"
    )

    async def run():
        process = RewardProcess(f"{path}:f", timeout_s=20)
        await process.start()
        try:
            await process.score([sample("a")])
            await until(done.exists)
        finally:
            await process.close()

    asyncio.run(run())


def test_a_call_that_becomes_slower_says_so(write, capfd):
    path = write("def f(completions, **kw): return [1.0] if len(completions) == 1 else 1 / 0")

    results, _ = score(path, ["a", "b"])

    assert results == [1.0, 1.0]
    said = capfd.readouterr().err
    assert "judged one by one; the latest had 2: ZeroDivisionError: division by zero" in said


def test_none_does_not_count(write):
    path = write(
        "def f(completions, **kw): return [None if c == 'b' else 1.0 for c in completions]"
    )

    assert score(path, ["a", "b"]) == ([1.0, None], 0)


def test_a_column_that_cannot_be_sent_costs_only_its_sample(write):
    async def run():
        process = RewardProcess(f"{write(GOOD['batch'])}:f", timeout_s=20)
        await process.start()
        try:
            huge = dataclasses.replace(sample("b"), columns={"n": 2**70})
            return await process.score([sample("a"), huge, sample("cc")])
        finally:
            await process.close()

    results = asyncio.run(run())

    assert (results[0], results[2]) == (1.0, 2.0)
    assert "columns of an item must fit into a message to its reward" in str(results[1])


def test_a_reward_without_function_name_is_refused():
    with pytest.raises(SettingsError, match=r"must be path/to/file.py:function or module:function"):
        check(make_settings("rewards.py"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1.0", "must be a list of floats, got float"),
        ("return [1.0]", "a list of 2 floats"),
        ("return [1.0] * 7", "a list of 2 floats, one for each completion, got 7"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("return [None] * len(completions)", "got None from every function"),
    ],
)
def test_check_names_what_a_function_returns_wrongly(write, body, words):
    path = write(f"def f(prompts, completions, **kwargs): {body}")
    settings = make_settings(f"{path}:f")

    with pytest.raises(RewardError, match=f"(?s)run.reward failed on the sample .*{words}"):
        check(settings)


def make_settings(reward: str | None) -> Settings:
    return Settings(
        run=RunSettings(model="init", environment="calculator", reward=reward, reward_timeout_s=5)
    )


def check(settings: Settings) -> str:
    return check_reward(settings.run, settings.actors, check_environment(settings.run))


def test_check_describes_what_will_judge(write):
    path = write(GOOD["completion_answer"])

    assert check(make_settings(f"{path}:f")) == f"{path}:f, called with a sample"
    assert check(make_settings(None)) == "the score of calculator"


def test_a_worker_ends_with_an_actor_that_dies_within_a_request(tmp_path):
    (tmp_path / "reward.py").write_text("def f(completion):\n    return 1.0\n")
    replies = io.BytesIO()

    serve(f"{tmp_path / 'reward.py'}:f", io.BytesIO(as_frame(bytes(100))[:50]), replies)

    replies.seek(0)
    assert b"Loaded" in (read_frame(replies.read) or b"")
    assert read_frame(replies.read) is None
