"""Faults of a machine, each injected: little memory, a full disk, an old Python, a taken port."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import tempfile

import pytest

from configs.errors import SettingsError
from configs.settings import BrokerSettings
from console.doctor import machine
from console.run.checks.check import GIB, CheckWarning
from tests.configs.support.fake_smi import hide_driver, install_smi


def free_bytes(monkeypatch, free):
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: usage(64 * GIB, 64 * GIB - free, free))


def test_small_shared_memory_is_warned_of(monkeypatch):
    free_bytes(monkeypatch, 64 * 2**20)

    found = machine.check_shared_memory()

    assert isinstance(found, CheckWarning)
    assert "should have 1.0 GiB free, got 64.0 MiB" in found.text
    assert "--shm-size" in found.text


def test_shared_memory_that_cannot_be_written_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")

    with pytest.raises(SettingsError, match="must be a folder that this user can write"):
        machine.check_shared_memory()


def test_a_full_disk_fails_and_a_nearly_full_one_is_warned_of(monkeypatch, tmp_path):
    free_bytes(monkeypatch, GIB // 2)
    with pytest.raises(SettingsError, match=r"must have 1.0 GiB free, got 512.0 MiB.*free some"):
        machine.check_disk(tmp_path / "runs")

    free_bytes(monkeypatch, 2 * GIB)
    assert isinstance(machine.check_disk(tmp_path / "runs"), CheckWarning)

    free_bytes(monkeypatch, 20 * GIB)
    assert str(tmp_path) in machine.check_disk(tmp_path / "runs")


def test_another_python_fails(monkeypatch):
    assert "cores" in machine.check_python()
    monkeypatch.setattr(platform, "python_version", lambda: "3.15.0")

    with pytest.raises(SettingsError, match=r"Python must be .*3\.11.*got 3\.15\.0"):
        machine.check_python()


def test_few_open_files_are_warned_of(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 4096))
    assert machine.check_open_files() == "at most 4096 at a time"  # which every role raises
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 1024))

    found = machine.check_open_files()

    assert isinstance(found, CheckWarning)
    assert "got 1024; raise it with `ulimit -Hn 4096`" in found.text


def test_a_tmpdir_that_is_too_long_for_sockets_is_told_of(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert machine.check_sockets() == "temporary ones are in /tmp"

    (tmp_path / ("t" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 100)))

    assert machine.check_sockets().endswith("ttt is too long for them")


def test_a_taken_default_port_is_warned_of(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        endpoint = f"tcp://127.0.0.1:{squatter.getsockname()[1]}"
        monkeypatch.setattr(machine, "BrokerSettings", lambda: BrokerSettings(endpoint=endpoint))

        found = machine.check_default_port()

    assert isinstance(found, CheckWarning)
    assert endpoint in found.text
    assert machine.check_default_port() == f"{endpoint} is free"


def test_cards_are_named_with_their_driver(monkeypatch, tmp_path):
    hide_driver(monkeypatch, tmp_path)
    assert machine.check_cards().startswith("none")

    install_smi(monkeypatch, tmp_path, cards=2)
    assert machine.check_cards() == "2 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.65.06"
