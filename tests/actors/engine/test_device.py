"""The engine's device is found without the CUDA driver, which a later fork would not survive."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from actors.engine import choice
from actors.engine.threaded import ThreadedEngine
from actors.engine.torch_engine import TorchStepper
from actors.engine_of_settings import make_engine
from configs.settings import ActorSettings, LearnerSettings, RunSettings, Settings

SETTINGS = Settings(run=RunSettings(model="init"))


class OneGpu:
    """NVML on a machine with one GPU: the two calls that answer how many there are."""

    def __init__(self, library: str) -> None:
        if "nvidia-ml" not in library:
            raise OSError(library)

    def nvmlInit(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 1
        return 0


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built for CUDA: this function is what it asks the driver with, and what makes it one.

    To call it forbids torch every later fork of the process, whatever it returns.
    """

    def driver() -> int:
        raise AssertionError("the CUDA driver must be left alone before vLLM starts its processes")

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", driver, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", OneGpu)
    monkeypatch.setattr(choice, "lack_of_vllm", lambda **_: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_is_found_and_the_driver_is_left_alone():
    _, device = make_engine(SETTINGS)

    assert device == "cuda"
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch, hidden: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)

    _, device = make_engine(SETTINGS)

    assert device == "cpu"


def test_without_a_driver_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch):
    def no_such_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_such_library)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0)  # torch's second source

    _, device = make_engine(SETTINGS)

    assert device == "cpu"


def test_a_repeatable_run_samples_on_the_cpu_beside_a_card():
    settings = Settings(
        run=RunSettings(model="init", deterministic=True, max_policy_lag=0),
        actors=ActorSettings(engine="torch", max_concurrent_episodes=1),
        learner=LearnerSettings(device="cpu", checkpoint_every=1),
    )

    engine, device = make_engine(settings)

    assert isinstance(engine, ThreadedEngine)
    assert isinstance(engine._stepper, TorchStepper)
    options = engine._stepper._options
    assert (device, options.device, options.deterministic) == ("cpu", "cpu", True)
