"""A machine that is to join by a pack: files that differ, and a broker that is not there."""

from __future__ import annotations

import socket

import pytest

from configs.errors import SettingsError
from configs.settings import BrokerSettings, LearnerSettings, RunSettings, Settings
from console.doctor.command import CheckStatus, examine
from console.doctor.implied import check_reached, pack_checks
from console.run.plan import prepare
from console.run.run_folder import RunFolder
from console.verbs.join_pack import write_pack


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """A pack of a run whose broker would listen at a port that is free."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reward = tmp_path / "reward.py"
    reward.write_text("def score(completion, answer):\n    return float(completion == answer)\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    settings = Settings(
        run=RunSettings(
            name="demo",
            directory=tmp_path / "runs",
            model="init",
            environment="calculator",
            reward=f"{reward}:score",
        ),
        broker=BrokerSettings(endpoint=endpoint),
        learner=LearnerSettings(publisher_endpoint=endpoint),
    )
    folder = RunFolder(settings.run.folder)
    prepare(settings, folder, redis_url="redis://:secret@127.0.0.1:1/0")
    folder.init.mkdir()
    (folder.init / "config.json").write_text("{}")
    write_pack(folder.path, "127.0.0.1", "site-a", tmp_path / "site-a.nyala")
    return tmp_path / "site-a.nyala"


def test_a_pack_is_compared_with_this_machine_and_its_broker_looked_for(pack):
    found = {each.name: each for each in examine(pack_checks(pack, []))}

    assert found["same as run"].text == "demo: no hash differs"
    assert found["broker"].grade is CheckStatus.FAILED
    assert "broker.endpoint must be reachable from this machine" in found["broker"].text
    assert found["reward"].grade is CheckStatus.OK


def test_another_reward_than_the_runs_fails_by_name(pack):
    (pack.parent / "reward.py").write_text("def score(completion, answer):\n    return 1.0\n")

    (found,) = examine(pack_checks(pack, []))

    assert found.grade is CheckStatus.FAILED
    assert "reward on this machine must be as on the run's machine" in found.text


def test_a_broker_that_listens_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert check_reached(endpoint) == f"{endpoint} takes connections"

    with pytest.raises(SettingsError, match="Connection refused; check that the run is up"):
        check_reached(endpoint)
