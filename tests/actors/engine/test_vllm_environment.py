"""The environment that vLLM reads when it is imported."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from actors.engine.vllm_options import VllmOptions, prepare_environment
from configs.machine import MAX_SOCKET_PATH_BYTES

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


def test_processes_are_spawned_since_a_fork_cannot_use_cuda(environment: dict[str, str]) -> None:
    prepare_environment(OPTIONS)

    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


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
