"""The engine that `actors.engine: auto` stands for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from actors.engine.choice import SMALL_BYTES, choose_engine
from configs.settings import ActorSettings, LearnerSettings, RunSettings, Settings


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())


def settings(model: Path | str, *, length: int = 12, **actors: Any) -> Settings:
    return Settings(
        run=RunSettings(model=str(model), max_completion_tokens=length),
        actors=ActorSettings(engine="auto", **actors),
    )


def model_of(folder: Path, num_bytes: int) -> Path:
    for part in (1, 2):
        with (folder / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(num_bytes // 2)
    return folder


def test_a_small_model_with_short_answers_is_quicker_without_vllm(tmp_path: Path) -> None:
    chosen = choose_engine(settings(model_of(tmp_path, SMALL_BYTES)), on_gpu=False)

    assert chosen.engine == "torch"
    assert "weights of 4.0 MB, answers of up to 12 tokens" in chosen.reason


def test_a_larger_model_or_longer_answers_are_quicker_in_vllm(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    model_of(small, SMALL_BYTES)
    model_of(large, SMALL_BYTES + 2)

    assert choose_engine(settings(small, length=33), on_gpu=False).engine == "vllm"
    assert choose_engine(settings(large), on_gpu=False).engine == "vllm"


def test_a_gpu_is_for_vllm(tmp_path: Path) -> None:
    chosen = choose_engine(settings(model_of(tmp_path, 1000)), on_gpu=True)

    assert chosen == ("vllm", "it has a GPU")


def test_without_vllm_there_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    chosen = choose_engine(settings(model_of(tmp_path, 10 * SMALL_BYTES)), on_gpu=True)

    assert chosen == ("torch", "vLLM is not installed")


@pytest.mark.parametrize(
    "own",
    [
        {"tensor_parallel_size": 2},
        {"engine_args": {"block_size": 32}},
        {"in_process": False},
        {"max_concurrent_episodes": "auto"},
    ],
)
def test_a_setting_that_vllm_alone_has_asks_for_it_installed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    chosen = choose_engine(settings(model_of(tmp_path, 1000), **own), on_gpu=False)

    assert chosen == ("vllm", f"actors.{next(iter(own))} is set")


def test_a_model_of_the_hub_is_taken_for_a_large_one() -> None:
    assert choose_engine(settings("Qwen/Qwen3-0.6B"), on_gpu=False).engine == "vllm"


@pytest.mark.parametrize(("width", "engine"), [(128, "torch"), (256, "vllm")])
def test_a_model_that_is_yet_to_be_made_is_estimated(width: int, engine: str) -> None:
    learner = LearnerSettings(init_layers=2, init_width=width)
    chosen = settings("init").model_copy(update={"learner": learner})

    assert choose_engine(chosen, on_gpu=False).engine == engine


def test_an_engine_that_is_set_stays() -> None:
    chosen = settings("init", tensor_parallel_size=2)
    torch = chosen.model_copy(update={"actors": ActorSettings(engine="torch")})

    assert choose_engine(torch, on_gpu=True) == ("torch", "actors.engine is set")
