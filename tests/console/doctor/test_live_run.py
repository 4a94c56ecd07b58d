"""Faults of a run that has begun: its files beside a real store."""

from __future__ import annotations

import json
import time

import pytest

from buffer import operations
from buffer.operations.run import broker_seen
from buffer.store import Store
from configs.errors import SettingsError
from configs.hashes import run_hashes
from configs.loader import load, save
from configs.settings import Settings
from console.doctor.live_run import (
    check_actors,
    check_brokers,
    check_code,
    check_leases,
    check_refusals,
    check_versions,
)
from console.run.checks.check import CheckWarning
from console.run.run_folder import RunFolder, write_versions


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(completion, answer):\n    return 1.0\n")
    reward = f"{tmp_path / 'rewards.py'}:score"
    run = {"name": "run", "model": "init", "environment": "calculator", "reward": reward}
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    save(Settings.model_validate({"run": run | {"directory": tmp_path}}), folder.config)
    write_versions(folder.path)
    return folder


@pytest.fixture
def store(redis_url, folder):
    """The store of the run, as its learner enters it."""
    run = load(folder.config).run
    with Store(redis_url, "run") as store:
        store.run(
            operations.begin_run(
                "c",
                run_hashes(run),
                units_per_batch=2,
                max_policy_lag=1,
                margin=1.0,
                group_size=4,
                min_group_size=2,
            )
        )
        yield store


def test_other_versions_than_at_the_start_are_warned_of(folder):
    assert "as in versions.json" in check_versions(folder)
    file = folder.path / "versions.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch": "2.0.0"}))

    found = check_versions(folder)

    assert isinstance(found, CheckWarning)
    assert "torch 2.0.0 then, 2." in found.text


def test_code_that_changed_since_the_run_began_fails_by_name(folder, store):
    settings = load(folder.config)
    assert "reward " in check_code(settings, store)
    (folder.path.parent / "rewards.py").write_text("def score(completion, answer):\n    return 2.0")

    with pytest.raises(
        SettingsError, match=r"^reward on this machine must be as when the run began"
    ):
        check_code(settings, store)


def test_silent_brokers_and_actors_are_warned_of(store):
    assert "got none" in str(check_brokers(store, 10))
    assert "got none (0 within the last hour)" in str(check_actors(store, 10))

    store.run(broker_seen("tcp://hub:5757", {"at": time.time() - 60, "actors": 1}))
    store.run(operations.actor_seen({"spot-7\nkey": {"host": "far", "version": "1.5"}}))
    assert "got tcp://hub:5757 1:00 min ago" in str(check_brokers(store, 10))
    assert check_brokers(store, 100) == "heard of tcp://hub:5757 1:00 min ago"
    assert str(check_actors(store, 10)).endswith("run's hashes: spot-7 on far with weights 1.5")


def test_refused_peers_are_warned_of_with_the_reason(folder, store):
    figures = {"at": time.time(), "refused_store": 3, "refused_hello": 1}
    store.run(broker_seen("tcp://hub:5757", figures))
    assert check_refusals(store, folder) == "none"

    store.run(broker_seen("tcp://hub:5757", figures | {"refused_mismatch": 2}))
    line = {"event": "refused", "code": "mismatch", "peer": "spot-7", "text": "reward must be"}
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "audit.jsonl").write_text(json.dumps(line) + "\n")
    found = check_refusals(store, folder)

    assert isinstance(found, CheckWarning)
    assert "got 2 x mismatch; " in found.text
    assert "mismatch of spot-7: reward must be" in found.text


def test_a_suspended_key_is_warned_of(folder, store):
    assert check_leases(store, folder) == "granted to all"
    store.run(operations.suspend("key-1", "9 of 10 failed", is_brief=False))

    found = check_leases(store, folder)

    assert isinstance(found, CheckWarning)
    assert "9 of 10 failed" in found.text
    assert f"nyala buffer resume {folder.path}" in found.text
