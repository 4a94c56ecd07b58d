"""`nyala top` through a broker: what an observer's key shows, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.protocol.messages import BeatRequest, Figures
from broker.transport.allow_list import Role, add, revoke
from buffer import operations
from configs.errors import RefusedError, SettingsError
from console.display.live_view import live_view
from console.live.top import Address, RemoteRun
from console.main import app
from learner.reporting.run_snapshot import RunSnapshot
from tests.broker.support.keys import keys_with_actor
from tests.broker.support.ring import FIRST, RUN, Ring, begin, ring, settings_with
from tests.console.support.recorded_run import rows
from tests.waiting import wait_until


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """An observer's key with the broker's public key, on a machine of its own."""
    keys = keys_with_actor(tmp_path / "keys")
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.copy2(add(keys, "ana", Role.OBSERVER), place)
    shutil.copy2(keys / "broker.pub", place)
    return place / "ana.key"


def watched(
    redis_url: str, key: Path, story: Callable[[Ring, RemoteRun], Coroutine[None, None, None]]
) -> None:
    """Play a story with a broker and who watches it."""

    async def play() -> None:
        async with ring(redis_url, key.parents[1] / "keys") as here:
            await begin(here.store, groups=3)
            run = RemoteRun(Address(here.endpoint, RUN), key)
            try:
                await story(here, run)
            finally:
                run.close()

    asyncio.run(play())


async def until_answered(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, holds)  # a thread of the run's asks the broker


def refusal_of(run: RemoteRun) -> str:
    try:
        run.read_view()
    except RefusedError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_an_observer_sees_figures_actors_and_buffer_without_a_folder(
    redis_url: str, key: Path
) -> None:
    run_snapshot = RunSnapshot()
    for row in rows():
        run_snapshot.add_batch(row)

    async def story(here: Ring, run: RemoteRun) -> None:
        await until_answered(lambda: run.read_view().fill is not None)
        assert not run.read_view().is_training
        actor = await here.actor()
        await actor.beat(BeatRequest((), FIRST, Figures(tokens_per_s=250.0, in_flight=16.0)))
        text = run_snapshot.encode()
        assert text is not None
        await here.store.run(operations.write_run_snapshot(1, text))

        await until_answered(
            lambda: run.read_view().is_training and run.read_view().actors_alive == 1
        )

        view = run.read_view()
        shown = "\n".join(line.plain for line in live_view(view, name="test", width=80, height=24))
        assert f"batch 47 of {view.progress.steps:,}" in shown
        assert f"{view.progress.tokens_per_s:,.0f} generated" in shown
        settings = settings_with().run
        admitted = (settings.max_policy_lag + 1) * settings.groups_per_batch
        assert f"0 of {admitted} groups" in shown
        assert "actor-1 on here" in shown
        assert " 250 " in shown
        assert "16 of 64" in shown
        assert view.sample is None

    watched(redis_url, key, story)


def test_the_end_of_a_run_reaches_an_observer(redis_url: str, key: Path) -> None:
    async def story(here: Ring, run: RemoteRun) -> None:
        await until_answered(lambda: run.read_view().fill is not None)
        assert not run.is_over
        await here.store.run(operations.cancel(1))
        await until_answered(lambda: run.is_over)

    watched(redis_url, key, story)


def test_a_key_that_is_revoked_sees_nothing_more(redis_url: str, key: Path) -> None:
    async def story(here: Ring, run: RemoteRun) -> None:
        await until_answered(lambda: run.read_view().fill is not None)
        revoke(here.keys, "ana")

        await until_answered(lambda: refusal_of(run) != "")

    watched(redis_url, key, story)


def test_a_key_of_an_actor_does_not_look(redis_url: str, key: Path) -> None:
    actor = shutil.copy2(key.parents[1] / "keys" / "actor.key", key.parent)

    async def story(here: Ring, run: RemoteRun) -> None:
        as_actor = RemoteRun(Address(here.endpoint, RUN), Path(actor))

        await until_answered(lambda: refusal_of(as_actor) != "")
        text = "StatusRequest must come from observer or operator, got the actor"
        assert text in refusal_of(as_actor)

    watched(redis_url, key, story)


def test_a_broker_that_is_away_is_named_while_it_is_waited_for(key: Path) -> None:
    run = RemoteRun(Address("tcp://127.0.0.1:1", RUN), key)
    view = run.read_view()
    run.close()

    assert not view.is_training
    assert view.stages == {"tcp://127.0.0.1:1": "nobody has answered yet"}


@pytest.mark.parametrize(
    "text",
    ["http://hub:1/demo", "tcp://hub:1", "tcp://hub/demo", "tcp://hub:x/demo", "tcp://h:1/a/b"],
)
def test_an_address_has_host_port_and_run(text: str) -> None:
    with pytest.raises(SettingsError, match="RUN must be the folder of a run, or tcp://HOST:PORT"):
        Address.parse(text)
    assert Address.parse("tcp://hub:5757/demo") == Address("tcp://hub:5757", "demo")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tcp://hub:5757/demo"], "--key must be the file of an observer's key, got none"),
        (
            ["tcp://hub:5757/demo", "--key", "ana"],
            "ana.key, whose name ends in .key, got ana; name that",
        ),
        (["tcp://hub:5757/demo", "--key", "none.key"], "none.key must be a key that this process"),
        (["runs/demo", "--key", "ana.key"], "--key must be given with tcp://HOST:PORT/NAME"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments: list[str], error: str) -> None:
    answer = CliRunner().invoke(app, ["top", *arguments])

    assert answer.exit_code == 2
    assert error in " ".join(answer.output.split())
