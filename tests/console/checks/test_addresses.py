"""Addresses at which a run listens on this machine."""

from __future__ import annotations

import socket

import pytest

from configs.errors import SettingsError
from configs.settings import RunSettings, Settings
from console.run.checks.machine import check_addresses

FREE = "tcp://127.0.0.1:0"


def settings(**tables):
    run = RunSettings(model="init", environment="calculator")
    given = {"broker": {"endpoint": FREE}} | tables
    return Settings.model_validate({"run": run.model_dump(), **given})


@pytest.mark.parametrize(
    ("table", "key", "scheme"),
    [
        ("broker", "endpoint", "tcp"),
        ("learner", "publisher_endpoint", "tcp"),
        ("broker", "metrics_endpoint", "http"),
    ],
)
def test_a_port_in_use_is_named_by_its_setting(table, key, scheme):
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        endpoint = f"{scheme}://127.0.0.1:{squatter.getsockname()[1]}"
        given = settings(
            **{table: {"endpoint": FREE, key: endpoint}}
            if table == "broker"
            else {table: {key: endpoint}}
        )

        with pytest.raises(SettingsError, match=rf"{table}\.{key} must be an address that is free"):
            check_addresses(given)

    assert f"{table}.{key} {endpoint}" in check_addresses(given)


def test_pages_of_several_actors_count_on_and_one_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        given = settings(actors={"count": 2, "metrics_endpoint": f"http://127.0.0.1:{port - 1}"})

        with pytest.raises(
            SettingsError, match=rf"got http://127\.0\.0\.1:{port}, which is in use"
        ):
            check_addresses(given)


def test_one_port_for_two_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
    given = settings(
        broker={"endpoint": f"tcp://127.0.0.1:{port}"},
        learner={"metrics_endpoint": f"http://127.0.0.1:{port}"},
    )

    with pytest.raises(SettingsError, match=r"a port of its own.*the port of broker\.endpoint"):
        check_addresses(given)
