"""vLLM on a CPU: no compiler, a path with a blank, and nothing compiled or looked up before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.support.engine_probe import tiny_folder
from tests.needs import needs

pytestmark = [pytest.mark.live, needs("vLLM")]

SAMPLE = """
import asyncio, os, sys
import torch._dynamo  # as libraries may have done before
from actors.engine.engine import GenerationRequest
from actors.engine.vllm_engine import vllm_engine
from actors.engine.vllm_options import VllmOptions

async def sample():
    engine = vllm_engine(VllmOptions(sys.argv[1], max_model_len=64))
    await engine.start()
    engine.submit([GenerationRequest("a", (1, 2, 3), 8, 1.0, ())])
    made = 0
    while made < 8:
        made += sum(len(delta.token_ids) for delta in await engine.deltas())
    await engine.close()
    print("made", made, os.environ.get("LD_PRELOAD"), os.environ.get("TORCH_COMPILE_DISABLE"))

asyncio.run(sample())
"""


def test_it_starts_and_samples(tmp_path: Path) -> None:
    folder, tools = tmp_path / "a folder", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    (tools / "lscpu").symlink_to(str(shutil.which("lscpu")))  # which vLLM calls
    tiny_folder(folder, tied=True)
    told = {"CC", "CXX", "LD_PRELOAD", "TORCH_COMPILE_DISABLE"}
    environment = {name: value for name, value in os.environ.items() if name not in told}
    compiled = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
    }

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAMPLE, str(folder)],
        env=environment | compiled | {"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.stdout.endswith("made 8 None None\n"), done.stdout + done.stderr
    assert [*(folder / "torch").rglob("*.*")] == [], "something was compiled"
    assert not (folder / "vllm" / "modelinfos").exists(), "another program has imported vLLM"
