"""The processor and libraries that decide the last bits of sums."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from configs import machine
from configs.hashes import run_hashes
from configs.machine import arithmetic_hash
from configs.settings import RunSettings

X86 = "processor : 0\nmodel name : AMD EPYC\nflags : fpu avx2 avx512f fma\nprocessor : 1\n"
ARM = "processor : 0\nFeatures : fp asimd sve\n"


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cpuinfo"
    place.write_text(X86)
    monkeypatch.setattr(machine, "CPUINFO", place)
    return place


@pytest.mark.parametrize(
    "other",
    [X86.replace("EPYC", "Ryzen"), X86.replace(" avx512f", ""), ARM, ARM.replace(" sve", "")],
)
def test_another_processor_has_another_hash(cpuinfo: Path, other: str) -> None:
    known = arithmetic_hash()

    cpuinfo.write_text(other)

    assert arithmetic_hash() != known


def test_what_a_kernel_of_linux_adds_to_the_flags_does_not_count(cpuinfo: Path) -> None:
    known = arithmetic_hash()

    cpuinfo.write_text(
        X86.replace("fpu", "fpu ibrs_enhanced").replace("avx2 avx512f", "avx512f avx2")
    )

    assert arithmetic_hash() == known


@pytest.mark.parametrize("library", ["torch", "transformers", "numpy"])
def test_another_release_of_a_library_has_another_hash(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    known = arithmetic_hash()
    other = {library: "0.0.1"}
    monkeypatch.setattr(machine, "version", lambda name: other.get(name) or version(name))

    assert arithmetic_hash() != known


def test_a_machine_without_cpuinfo_has_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = arithmetic_hash()
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "nothing")

    assert arithmetic_hash() != known


def test_processors_are_compared_only_where_every_bit_counts() -> None:
    usual = RunSettings(model="init", environment="calculator")

    assert "processor_and_torch" not in run_hashes(usual)
    repeatable = usual.model_copy(update={"deterministic": True})
    assert run_hashes(repeatable)["processor_and_torch"] == arithmetic_hash()
