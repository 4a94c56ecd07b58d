"""Keys that a run is given: complete, and open to nobody else."""

from __future__ import annotations

import pytest

from broker.transport.keys import make_client, make_keys
from configs.errors import SettingsError
from configs.settings import BrokerSettings
from console.run.checks.machine import check_keys


@pytest.fixture
def keys(tmp_path):
    folder = make_keys(tmp_path / "keys")
    make_client(folder, "actor-0")
    return folder


def test_complete_keys_pass_with_their_number(keys):
    assert check_keys(BrokerSettings(keys=keys)) == f"4 secrets in {keys}"


@pytest.mark.parametrize("name", ["broker", "actor-0", "enrolment"])
def test_a_secret_that_others_can_read_fails(keys, name):
    (keys / f"{name}.key").chmod(0o644)

    with pytest.raises(SettingsError, match=rf"{name}\.key must be readable by its owner alone"):
        check_keys(BrokerSettings(keys=keys))


def test_a_missing_or_malformed_key_fails(keys):
    (keys / "broker.key").write_text("short\n")
    with pytest.raises(SettingsError, match="must hold a z85 key of 40 characters"):
        check_keys(BrokerSettings(keys=keys))

    (keys / "broker.key").unlink()
    with pytest.raises(SettingsError, match=r"broker\.key must be a key that this"):
        check_keys(BrokerSettings(keys=keys))
