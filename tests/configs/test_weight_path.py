"""Weights leave a machine unencrypted only where somebody says that the network is trusted."""

from __future__ import annotations

import pytest

from configs.hashes import settings_hash
from configs.settings import LearnerSettings, RunSettings
from configs.weight_path import describe_weight_path, uses_groups

NEAR, FAR = "tcp://127.0.0.1:0", "tcp://0.0.0.0:5758"


@pytest.mark.parametrize(
    ("endpoint", "is_trusted", "broadcast", "expected"),
    [
        (NEAR, False, None, "over process groups, not encrypted: the publisher listens on this"),
        (FAR, True, None, "over process groups, not encrypted: run.trusted_network is true"),
        (FAR, False, None, "pulled over CURVE: learner.publisher_endpoint is tcp://0.0.0.0:5758"),
        (FAR, True, False, "pulled over CURVE: learner.broadcast is false"),
        (NEAR, False, False, "pulled over CURVE: learner.broadcast is false"),
        (NEAR, False, True, "over process groups, not encrypted: the publisher listens on this"),
    ],
)
def test_groups_are_used_on_loopback_or_a_trusted_network_alone(
    endpoint: str, is_trusted: bool, broadcast: bool | None, expected: str
) -> None:
    run = RunSettings(model="init", trusted_network=is_trusted)
    learner = LearnerSettings(publisher_endpoint=endpoint, broadcast=broadcast)

    path = describe_weight_path(run, learner)

    assert path.startswith(expected)
    assert uses_groups(run, learner) == path.startswith("over process groups")


def test_a_publisher_that_is_reached_as_another_forms_no_group() -> None:
    run = RunSettings(model="init", trusted_network=True)
    learner = LearnerSettings(publisher_endpoint=FAR, advertise="hub.example.org:5758")

    assert not uses_groups(run, learner)
    path = "pulled over CURVE: actors reach the publisher as hub.example.org:5758"
    assert describe_weight_path(run, learner) == path


def test_trust_in_the_network_is_each_machines_own() -> None:
    """An actor need not say so: only the learner's machine opens a group."""
    trusting = RunSettings(model="init", trusted_network=True)

    assert settings_hash(trusting) == settings_hash(RunSettings(model="init"))
