"""Commands on a machine that lacks what vLLM needs: a made path without compilers, and a loader's
path on which libnuma is no library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.transport.keys import make_client, make_keys
from console.run.redis_server import free_port
from tests.needs import needs

pytestmark = [pytest.mark.slow, needs("vLLM")]  # which is then hidden

SETTINGS = """
run: {{name: r, directory: "{directory}", model: init, environment: calculator, steps: 1}}
broker: {{endpoint: "tcp://127.0.0.1:{port}"}}
actors: {{engine: {engine}}}
"""
LACK = (
    "vLLM cannot load libnuma.so.1 (Debian, Ubuntu: apt install libnuma1; Fedora: dnf install "
    "numactl-libs)"
)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    tools, libraries = tmp_path / "tools", tmp_path / "libraries"
    for folder in (tools, libraries):
        folder.mkdir()
    (libraries / "libnuma.so.1").write_text("not a library")
    (tools / "lscpu").symlink_to(str(shutil.which("lscpu")))
    return os.environ | {"PATH": str(tools), "LD_LIBRARY_PATH": str(libraries), "COLUMNS": "2000"}


def nyala(
    machine: dict[str, str], folder: Path, *arguments: str, engine: str
) -> subprocess.CompletedProcess[str]:
    settings = folder / "settings.yaml"
    text = SETTINGS.format(directory=folder / "runs", port=free_port(), engine=engine)
    settings.write_text(text)
    keys = folder / "runs" / "r" / "keys"
    if not keys.exists():
        make_keys(keys)
        make_client(keys, "actor")
    return subprocess.run(
        [Path(sys.executable).with_name("nyala"), *arguments, str(settings)],
        env=machine,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [("up", 2), ("up --dry-run", 2), ("actor", 2), ("doctor", 1)],
)
def test_vllm_is_refused_by_every_command_in_the_same_words(
    machine: dict[str, str], tmp_path: Path, words: str, code: int
) -> None:
    done = nyala(machine, tmp_path, *words.split(), engine="vllm")

    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert (
        "actors.engine must be an engine that can start on this machine, got vllm (actors.engine "
        f"is set), but {LACK}; mend that, or set actors.engine: auto"
    ) in " ".join(output.split())
    assert not (tmp_path / "runs" / "r" / "logs").exists(), "nothing was started"


@pytest.mark.parametrize("words", ["up --dry-run", "doctor"])
def test_auto_warns_of_what_is_missing(machine: dict[str, str], tmp_path: Path, words: str) -> None:
    done = nyala(machine, tmp_path, *words.split(), engine="auto")

    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, output
    assert f"slower for all but very small models: {LACK}" in output
