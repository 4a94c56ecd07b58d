"""`nyala up` refuses a learner that would leave out this machine's GPUs, or has too few of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from configs.errors import SettingsError
from configs.settings import LearnerSettings
from console.run.checks import machine
from console.run.checks.machine import check_devices
from tests.configs.support.fake_smi import hide_driver, install_smi


def torch_says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A torch as it answers on a machine with cards: the one installed here has no CUDA."""
    monkeypatch.setattr(machine, "ASK_TORCH", f"print({text!r})")


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_driver(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    check_devices(LearnerSettings(device="cuda", ranks=2))
    check_devices(LearnerSettings(device="cpu", ranks=8))
    with pytest.raises(SettingsError, match="must be <= the GPUs of this machine = 2, got 4"):
        check_devices(LearnerSettings(device="cuda", ranks=4))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_card_that_torch_does_not_see_is_never_left_out_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    install_smi(monkeypatch, tmp_path, driver="550.54.14")
    torch_says(monkeypatch, "0 13.0")
    with pytest.raises(SettingsError, match=rf"got {device}.*needs driver 580 or newer, got 550"):
        check_devices(LearnerSettings(device=device))

    torch_says(monkeypatch, "0 ")
    with pytest.raises(SettingsError, match="a build for CPUs; set up with PROFILE=cuda"):
        check_devices(LearnerSettings(device=device))

    check_devices(LearnerSettings(device="cpu"))


def test_an_old_driver_that_torch_gets_on_with_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smi(monkeypatch, tmp_path, driver="550.54.14")  # with NVIDIA's cuda-compat
    torch_says(monkeypatch, "1 13.0")

    check_devices(LearnerSettings(device="auto"))


def test_torch_is_asked_only_where_there_is_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("torch takes seconds to import")

    hide_driver(monkeypatch, tmp_path)
    monkeypatch.setattr(subprocess, "run", run)

    check_devices(LearnerSettings(device="auto"))


@pytest.mark.slow
def test_the_installed_torch_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # none that any machine of tests has

    with pytest.raises(SettingsError, match=r"learner\.device must be cpu to train without"):
        check_devices(LearnerSettings(device="auto"))
