"""`nyala runs`: the runs of one Redis."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from buffer import operations
from buffer.store import Store
from configs.errors import SettingsError
from console.live.runs import app
from tests.buffer.support.run_in_store import RunInStore


def begin(url: str, name: str) -> None:
    with Store(url, name) as store:
        store.run(
            operations.begin_run(
                "c",
                {},
                units_per_batch=2,
                max_policy_lag=1,
                margin=1.0,
                group_size=4,
                min_group_size=2,
            )
        )


def test_each_run_has_its_state_actors_and_bytes(redis_url: str) -> None:
    begin(redis_url, "other")
    with Store(redis_url, "run") as store, RunInStore(store, redis_url) as run:
        run.create(2)
        tasks = run.lease()
        run.submit(tasks)
        store.run(operations.actor_seen({"a\ntag": {"host": "h"}}))
        run.train(1)

    result = CliRunner().invoke(app, ["--redis", redis_url, "--json"])
    table = CliRunner().invoke(app, [], env={"NYALA_REDIS_URL": redis_url})

    other, mine = json.loads(result.stdout)
    assert other == {
        "run": "other",
        "state": "RUNNING",
        "version": 0,
        "lineage": 0,
        "actors": 0,
        "bytes": 0,
        "last_seen_s": None,
    }
    records = sum(len(f"record {task.task_id}") for task in tasks)
    assert (mine["run"], mine["version"], mine["actors"]) == ("run", 1, 1)
    assert mine["bytes"] == records and 0 <= mine["last_seen_s"] < 60
    assert [line.split()[:3] for line in table.stdout.splitlines()[1:]] == [
        ["other", "RUNNING", "0.0"],
        ["run", "RUNNING", "1.1"],
    ]


def test_an_empty_redis_and_no_redis_are_named(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NYALA_REDIS_URL", raising=False)

    assert "no run is in this Redis" in CliRunner().invoke(app, ["--redis", redis_url]).stdout
    error = CliRunner().invoke(app, []).exception
    assert isinstance(error, SettingsError)
    assert "--redis must be the URL of a Redis server, got none" in str(error)
