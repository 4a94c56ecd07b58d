"""The environment that vLLM reads when it is imported."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from actors.engine import vllm_options
from actors.engine.vllm_engine import VllmStepper
from actors.engine.vllm_options import VllmOptions, engine_arguments, prepare_environment
from configs.machine import COMPILED, MAX_SOCKET_PATH_BYTES

OPTIONS = VllmOptions("model", max_model_len=64, in_process=False)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty environment in place of ours."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    return variables


def test_the_processes_of_one_engine_talk_over_loopback(environment: dict[str, str]) -> None:
    prepare_environment(replace(OPTIONS, tensor_parallel_size=2))

    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("met", "workers", "method"), [(False, 1, "fork"), (True, 1, "spawn"), (False, 2, "spawn")]
)
def test_one_worker_is_forked_where_cuda_was_not_met(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    met: bool,
    workers: int,
    method: str,
) -> None:
    monkeypatch.setattr(vllm_options, "has_met_cuda", lambda: met)

    prepare_environment(replace(OPTIONS, tensor_parallel_size=workers))

    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == method


@pytest.mark.parametrize("concurrent", [1, 3, 8, 100, 256, 300, 1000])
def test_graphs_are_made_for_steps_that_occur(
    monkeypatch: pytest.MonkeyPatch, concurrent: int
) -> None:
    monkeypatch.setattr(vllm_options, "engine_device", lambda: "cuda")

    sizes = engine_arguments(replace(OPTIONS, max_concurrent=concurrent))["cudagraph_capture_sizes"]

    assert sizes == sorted({*sizes})
    assert sizes[-1] <= min(2 * concurrent, 512)
    assert min(concurrent, 512) in sizes  # the fullest step is computed as it is
    assert len(sizes) <= 24
    for tokens in range(8, min(concurrent, 512)):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens < 8 or padded < 1.34 * tokens


@pytest.mark.parametrize(
    "own",
    [
        {"cudagraph_capture_sizes": [1, 2]},
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": {"cudagraph_capture_sizes": [4]}},
        {"performance_mode": "interactivity"},
        {"enforce_eager": True},
    ],
)
def test_a_persons_choice_of_graphs_stays(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    monkeypatch.setattr(vllm_options, "engine_device", lambda: "cuda")

    made = engine_arguments(replace(OPTIONS, engine_args=own))
    other = engine_arguments(replace(OPTIONS, engine_args={"block_size": 16}))

    assert {key: made[key] for key in own} == own
    assert made.get("cudagraph_capture_sizes") == own.get("cudagraph_capture_sizes")
    assert other["cudagraph_capture_sizes"][-1] == 512


def test_a_cpu_makes_no_graphs() -> None:
    assert "cudagraph_capture_sizes" not in engine_arguments(OPTIONS)


def test_an_engine_that_compiles_says_so_and_names_the_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_options, "engine_device", lambda: "cuda")

    with capture_logs() as lines:
        VllmStepper(OPTIONS)._arguments()
        VllmStepper(replace(OPTIONS, engine_args={"enforce_eager": True}))._arguments()

    (line,) = lines
    assert "compiling what is not kept yet" in line["stage"]
    assert line.keys() >= COMPILED.keys()


def test_sockets_of_vllm_have_a_short_path_under_a_long_tmpdir(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ("t" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 100)))

    prepare_environment(OPTIONS)

    assert len(f"{environment['VLLM_RPC_BASE_PATH']}/{uuid4()}") <= MAX_SOCKET_PATH_BYTES


def test_what_a_person_has_set_stays(environment: dict[str, str]) -> None:
    environment |= {"GLOO_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "4"}

    prepare_environment(OPTIONS)

    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert environment["OMP_NUM_THREADS"] == "4"


def test_a_communicator_that_does_not_form_is_given_up_in_the_worker(
    environment: dict[str, str],
) -> None:
    prepare_environment(OPTIONS)

    assert 0 < int(environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) <= 60  # torch's: half an hour
