"""A language model as a judge, beside a local stand-in server of ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rewards.functions import Convention, RewardSample, recognise
from actors.rewards.judge import MOST_UNREAD, Judge, read_score
from actors.rewards.pool import RewardPool
from configs.errors import RewardError, SettingsError
from configs.settings import ActorSettings, RunSettings
from tests.actors.support.judge_server import JudgeServer

pytest.importorskip("openai")

RUBRIC = "From 0 to 10, how good is this?\nQUESTION: {prompt}\nLEVEL: {level}\nANSWER: {completion}"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def rubric(tmp_path: Path) -> Path:
    path = tmp_path / "rubric.txt"
    path.write_text(RUBRIC)
    return path


def ask(judge: Judge, *completions: str) -> list[float]:
    n = len(completions)
    columns = {"level": ["hard"] * n, "index": [0] * n}
    return asyncio.run(judge(["1+1="] * n, list(completions), ["2"] * n, **columns))


def test_a_completion_gets_the_last_number_of_the_reply(server: JudgeServer, rubric: Path) -> None:
    judge = Judge(url=server.url, model="m", rubric=rubric)

    assert ask(judge, "two", "eleven") == [0.3, 0.6]
    letter = "From 0 to 10, how good is this?\nQUESTION: 1+1=\nLEVEL: hard\nANSWER: two"
    assert letter in server.letters
    assert judge.cost == (
        "judge m: 2 replies, 0 without a score, 0 from the cache, "
        "40 prompt and 10 completion tokens"
    )


def test_a_rubric_may_ask_for_what_lies_in_a_column(server: JudgeServer, tmp_path: Path) -> None:
    path = tmp_path / "rubric.txt"
    path.write_text("{completion}: {extra_info.level}, {extra_info}")
    judge = Judge(url=server.url, model="m", rubric=path)
    columns = {"extra_info": [{"level": "hard", "many": [1]}]}

    asyncio.run(judge(["1+1="], ["two"], ["2"], **columns))

    assert server.letters == ['two: hard, {"level": "hard", "many": [1]}']


def test_what_was_asked_once_is_not_asked_again_by_anyone_with_the_same_file(
    server: JudgeServer, rubric: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "scores.sqlite"
    first = Judge(url=server.url, model="m", rubric=rubric, cache=cache)
    second = Judge(url=server.url, model="m", rubric=rubric, cache=cache)

    assert ask(first, "two", "two") == ask(second, "two", "two") == ask(first, "two", "two")
    assert (first.num_cached, second.num_replies) == (2, 0)
    assert ask(Judge(url=server.url, model="other", rubric=rubric, cache=cache), "two") == [0.3]
    assert len(server.letters) == 3  # both of the first call, and the other model's


def test_no_more_requests_than_allowed_are_on_their_way(server: JudgeServer, rubric: Path) -> None:
    judge = Judge(url=server.url, model="m", rubric=rubric, concurrency=3)

    ask(judge, *("a" * n for n in range(1, 10)))

    assert server.busiest == 3


def test_a_server_that_is_overloaded_is_asked_again(server: JudgeServer, rubric: Path) -> None:
    server.failures_left = 2

    assert ask(Judge(url=server.url, model="m", rubric=rubric), "two") == [0.3]
    assert len(server.letters) == 3


def test_a_column_that_there_is_not_is_named(server: JudgeServer, rubric: Path) -> None:
    rubric.write_text('Reply {"like": "this"} about {solution}.')
    judge = Judge(url=server.url, model="m", rubric=rubric)

    with pytest.raises(ValueError, match=r"one of answer, completion, index, level, prompt, got"):
        ask(judge, "two")
    assert not server.letters


@pytest.mark.parametrize("reply", ["no idea", "11", "-1", "8 of 10, so 80"])
def test_a_reply_without_a_score_is_refused(reply: str) -> None:
    with pytest.raises(ValueError, match="must end its reply with a number from 0 to 10"):
        read_score(reply, 10.0)


def test_a_rubric_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"the rubric of a judge must be a text file, got"):
        Judge(url="http://127.0.0.1:1/v1", model="m", rubric=tmp_path / "none.txt")


@pytest.mark.slow
def test_a_reply_without_a_score_counts_nothing_and_many_in_a_row_are_refused(
    server: JudgeServer, rubric: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Judge(url=server.url, model="m", rubric=rubric)
    with pytest.raises(ValueError, match="must end its reply with a number"):
        ask(judge, "odd")  # nothing shows yet that the rubric works

    assert ask(judge, "two") == [0.3]
    assert ask(judge, *["odd"] * 9, "a completion beyond the scale") == [0.0] * 10
    assert judge.num_unread == 10
    assert capsys.readouterr().err.count("replies without a score count 0") == 4  # 1, 2, 4, 8
    assert ask(judge, "four") == [0.4]
    with pytest.raises(ValueError, match="must end its reply with a number"):
        ask(judge, *["odd"] * (MOST_UNREAD + 1))


def test_a_completion_without_a_score_costs_no_attempt_later(
    server: JudgeServer, rubric: Path, tmp_path: Path
) -> None:
    source = f"from actors.rewards.judge import Judge\nhelpful = Judge(url={server.url!r}, "
    (tmp_path / "rewards.py").write_text(source + f"model='m', rubric={str(rubric)!r})\n")
    name = f"{tmp_path / 'rewards.py'}:helpful"
    run = RunSettings(model="init", environment="calculator", reward=name)
    samples = [
        RewardSample("1+1=", (7,), text, (1,), "2", 3, "train", 0.0, columns={"level": "hard"})
        for text in ("two", "odd", "eleven")
    ]

    async def story() -> list[dict[str, float] | RewardError]:
        pool = RewardPool(run, ActorSettings(reward_retries=0))
        try:
            return await pool.score(samples)
        finally:
            await pool.close()

    right, odd, long = asyncio.run(asyncio.wait_for(story(), 60))

    assert [right, odd, long] == [{"helpful": each} for each in (0.3, 0.0, 0.6)]


def test_a_judge_is_called_with_all_samples_at_once(rubric: Path) -> None:
    judge = Judge(url="http://127.0.0.1:1/v1", model="m", rubric=rubric)

    assert recognise(judge, "rewards.py:helpful") is Convention.BATCH
