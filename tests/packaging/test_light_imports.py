"""The light rooms start without the heavy libraries, whatever is installed beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from console.command_line import VERBS

ROOT = Path(__file__).parents[2]

LOAD = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(*modules: str) -> set[str]:
    """Import modules in a fresh interpreter and list the top-level modules that came along."""
    return {name.partition(".")[0] for name in all_loaded_by(*modules)}


def all_loaded_by(*modules: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(modules)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(done.stdout))


def modules_of(package: str) -> list[str]:
    files = (ROOT / package).rglob("*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    unrunnable = ("__main__", "deploy", "agent")  # starting points and scripts are not imported
    return sorted(
        name.removesuffix(".__init__")
        for name in names
        if not any(part in unrunnable for part in name.split("."))
    )


@pytest.mark.parametrize("package", ["configs", "buffer", "broker", "agents"])
def test_a_light_room_loads_no_heavy_library(package):
    modules = modules_of(package)

    assert package in modules
    assert not loaded_by(*modules) & {"torch", "transformers", "vllm"}


def test_the_episode_record_loads_without_redis():
    assert "redis" not in loaded_by("buffer.record.episode", "buffer.record.codec")


def test_the_settings_load_without_redis_zmq_or_numpy():
    assert not loaded_by("configs.settings", "configs.loader") & {"redis", "zmq", "numpy"}


def test_a_list_of_checkpoints_loads_no_heavy_library():
    assert not loaded_by("console.verbs.checkpoints") & {"torch", "transformers", "vllm"}


@pytest.mark.slow
def test_no_role_loads_the_export_of_traces_before_it_traces():
    roles = ("actors.__main__", "actors.assembly", "broker.__main__", "learner.__main__")

    found = all_loaded_by(*roles, "learner.data.claims")

    assert "configs.tracing" in found
    # redis-py loads parts of OpenTelemetry where it is installed.
    assert not found & {"configs.otlp", "opentelemetry.exporter", "opentelemetry.sdk.trace"}


def test_asking_for_help_loads_no_heavy_library():
    assert not loaded_by("console.main") & {"torch", "transformers", "vllm", "zmq", "pydantic"}


def test_asking_for_the_help_of_a_verb_loads_no_heavy_library():
    modules = {module for module, _ in VERBS.values()}

    assert not loaded_by(*modules) & {"torch", "transformers", "vllm"}


def test_the_python_interface_loads_no_heavy_library():
    assert not loaded_by("nyala") & {"torch", "transformers", "vllm", "zmq"}
