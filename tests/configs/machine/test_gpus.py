"""GPUs as the driver lists them, and the error of a torch that sees none of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.machine import LEAST_DRIVERS, gpu_left_out, query_gpus, visible_gpus
from tests.configs.support.fake_smi import hide_driver, install_smi

ROOT = Path(__file__).parents[3]


def test_only_visible_gpus_are_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_card_is_listed_with_its_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smi(monkeypatch, tmp_path, cards=2)

    assert visible_gpus() == ["0", "1"]
    assert query_gpus("name") == ["NVIDIA H100 80GB HBM3"] * 2


def test_a_driver_that_fails_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(monkeypatch, tmp_path, fails=True)

    assert visible_gpus() == []
    assert gpu_left_out("auto", "13.0") is None


@pytest.mark.parametrize(
    ("driver", "cuda", "reason"),
    [
        ("535.104.05", "13.0", "CUDA 13.0 needs driver 580 or newer, got 535.104.05; update the"),
        ("520.61", "12.8", "CUDA 12.8 needs driver 525 or newer, got 520.61; update the driver"),
        ("535.104.05", "12.8", "torch, built for CUDA 12.8, sees none; find out why"),
        ("580.65.06", "13.0", "torch, built for CUDA 13.0, sees none; find out why"),
        ("[N/A]", "14.1", "torch, built for CUDA 14.1, sees none; find out why"),
        ("580.65.06", None, "torch is a build for CPUs; set up with PROFILE=cuda ./run setup"),
    ],
)
def test_the_error_says_what_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, cuda: str | None, reason: str
) -> None:
    install_smi(monkeypatch, tmp_path, driver=driver)

    error = gpu_left_out("auto", cuda)

    assert error is not None
    assert error.startswith(
        "learner.device must be cpu to train without this machine's 1 GPU(s), got auto: nvidia-smi "
        f"lists NVIDIA H100 80GB HBM3, and {reason}"
    )
    assert error.endswith(", or set learner.device: cpu")


def test_a_gpu_that_is_hidden_or_not_there_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smi(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_left_out("auto", "13.0") is None

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as some set it everywhere
    hide_driver(monkeypatch, tmp_path)
    assert gpu_left_out("auto", "13.0") is None


def test_run_asks_for_the_driver_of_the_locks_cuda() -> None:
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    major = re.search(r"^cuda-toolkit==(\d+)\.", lock, re.MULTILINE)

    assert major is not None
    assert f'"${{driver:-{LEAST_DRIVERS[int(major[1])]}}}" -lt' in (ROOT / "run").read_text()
