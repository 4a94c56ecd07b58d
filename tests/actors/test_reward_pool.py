"""Several reward functions, several workers, and workers that crash, hang or run out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from actors.environments.registry import check_environment
from actors.rewards import process as reward_process
from actors.rewards.functions import RewardSample
from actors.rewards.pool import RewardPool, check_reward
from configs.errors import RewardError
from configs.settings import ActorSettings, RunSettings, Settings

T = TypeVar("T")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_process, "RETRY_PAUSE_S", 0.0)


def _write(folder: Path, **sources: str) -> list[str]:
    """Write each source into a file of its own; returns the functions, one of each name."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return [f"{folder / name}.py:{name}" for name in sources]


def _settings(rewards: list[str], *, timeout_s: float = 20.0, **actors: object) -> Settings:
    return Settings(
        run=RunSettings(
            model="init", environment="calculator", reward=rewards, reward_timeout_s=timeout_s
        ),
        actors=ActorSettings.model_validate(actors),
    )


def _with_pool(settings: Settings, story: Callable[[RewardPool], Awaitable[T]]) -> T:
    async def tell() -> T:
        pool = RewardPool(settings.run, settings.actors)
        try:
            return await story(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(tell(), 60))


def _sample(completion: str) -> RewardSample:
    return RewardSample("1+1=", (7,), completion, (1, 2), "2", 3, "train", 0.5)


def _score(settings: Settings, *completions: str) -> list[dict[str, float] | RewardError]:
    samples = [_sample(completion) for completion in completions]
    return _with_pool(settings, lambda pool: pool.score(samples))


def test_each_function_gives_a_part_under_its_name(tmp_path: Path) -> None:
    rewards = _write(
        tmp_path,
        exactly="def exactly(completion, answer): return float(completion == answer)",
        short="def short(completions, **kwargs): return [-len(c) for c in completions]",
    )

    results = _score(_settings(rewards), "2", "123")

    assert results == [{"exactly": 1.0, "short": -1.0}, {"exactly": 0.0, "short": -3.0}]


def test_a_function_that_does_not_count_is_left_out_and_one_must_count(tmp_path: Path) -> None:
    rewards = _write(
        tmp_path,
        maybe="def maybe(completion, answer): return None if len(completion) > 1 else 1.0",
        never="def never(completion, answer): return None",
    )

    one, none = _score(_settings(rewards), "2", "123")

    assert one == {"maybe": 1.0}
    assert "got None from every function" in str(none)


def test_check_describes_every_function(tmp_path: Path) -> None:
    one, two = _write(
        tmp_path,
        one="def one(output, prompt): return 1.0",
        two="def two(completions): return [1.0 for _ in completions]",
    )

    settings = _settings([one, two])
    described = check_reward(settings.run, settings.actors, check_environment(settings.run))

    assert described == f"{one}, called with a sample; {two}, called with a batch"


def test_a_sample_needs_a_reward_from_every_function(tmp_path: Path) -> None:
    rewards = _write(
        tmp_path,
        fine="def fine(completion): return 1.0",
        odd="def odd(completion): return float('nan') if completion == 'bad' else 1.0",
    )

    good, bad = _score(_settings(rewards), "good", "bad")

    assert good == {"fine": 1.0, "odd": 1.0}
    assert isinstance(bad, RewardError)
    assert str(bad).startswith("odd: reward must be finite, got nan; ")


@pytest.mark.parametrize(
    "form",
    [
        "def eat(completion):\n    if completion == 'bad': {eat}\n    return 1.0",
        (
            "def eat(completions):\n    if 'bad' in completions: {eat}\n"
            "    return [1.0 for _ in completions]"
        ),
    ],
)
def test_a_function_that_eats_memory_costs_only_its_sample(tmp_path: Path, form: str) -> None:
    source = "kept = []\n" + form.format(eat="kept.append(bytearray(2 << 30))")
    settings = _settings(_write(tmp_path, eat=source), reward_memory_mb=512)

    first, bad, last = _score(settings, "a", "bad", "c")

    assert first == last == {"eat": 1.0}
    assert isinstance(bad, RewardError)
    assert str(bad).startswith("reward must fit into actors.reward_memory_mb = 512 MiB, got more; ")


def test_memory_that_is_allowed_is_given(tmp_path: Path) -> None:
    source = "def big(completion): return float(len(bytearray(64 << 20)) > 0)"

    assert _score(_settings(_write(tmp_path, big=source), reward_memory_mb=512), "a") == [
        {"big": 1.0}
    ]


FAILS_ONCE = """
import os, pathlib, threading
def once(completion):
    if completion == 'bad':
        seen = pathlib.Path(__file__).with_suffix('.seen')
        if not seen.exists():
            seen.touch()
            {harm}
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        "os._exit(3)",
        "threading.Event().wait()",
        "raise OSError('no answer')",
        "return float('nan')",
    ],
)
def test_what_failed_once_is_judged_again(tmp_path: Path, harm: str) -> None:
    rewards = _write(tmp_path, once=FAILS_ONCE.format(harm=harm))

    results = _score(_settings(rewards, timeout_s=3.0, reward_retries=1), "a", "bad", "c")

    assert results == [{"once": 1.0}] * 3


def test_a_sample_is_judged_again_only_so_often(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    source = (
        "def always(completion):\n"
        f"    open({str(calls)!r}, 'a').write(completion)\n"
        "    return 1 / (completion != 'x')\n"
    )

    results = _score(_settings(_write(tmp_path, always=source), reward_retries=2), "a", "x")

    assert results[0] == {"always": 1.0}
    assert "ZeroDivisionError" in str(results[1])
    assert calls.read_text() == "axxx"


def test_a_hang_holds_up_one_worker_and_no_other(tmp_path: Path) -> None:
    release = tmp_path / "release"
    source = (
        "import pathlib, time\n"
        "def wait(completion):\n"
        f"    while completion == 'slow' and not pathlib.Path({str(release)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    return 1.0\n"
    )

    async def story(pool: RewardPool) -> None:
        slow = asyncio.create_task(pool.score([_sample("slow")]))
        await asyncio.sleep(0)  # it has its slot
        assert await pool.score([_sample("quick")]) == [{"wait": 1.0}]
        assert not slow.done()
        release.touch()
        assert await slow == [{"wait": 1.0}]

    _with_pool(_settings(_write(tmp_path, wait=source), reward_workers=2), story)


def test_a_worker_that_cannot_start_again_fails_its_samples_and_raises_nothing(
    tmp_path: Path,
) -> None:
    rewards = _write(tmp_path, gone="import os\ndef gone(completion): os._exit(3)")

    async def story(pool: RewardPool) -> list[dict[str, float] | RewardError]:
        await pool.score([_sample("a")])
        (tmp_path / "gone.py").unlink()
        return await pool.score([_sample("a"), _sample("b")])

    results = _with_pool(_settings(rewards, reward_retries=0), story)

    assert all("there is no" in str(result) for result in results)
