"""Compiled code on a machine, and on another that is given it; both are home folders of this one.

Run beside CI, `pytest -s -q tests/system/compiled_caches.py`: vLLM compiles on a CPU as it does on
a card, and takes a minute. The time of each start is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.machine import COMPILED
from tests.actors.support.engine_probe import tiny_folder
from tests.needs import needs

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800), needs("vLLM")]
PATIENCE_S = 600

ENGINE = """
import asyncio, sys
from actors.engine.engine import GenerationRequest
from actors.engine.vllm_engine import vllm_engine
from actors.engine.vllm_options import VllmOptions

async def sample():
    options = VllmOptions(sys.argv[1], max_model_len=64, engine_args={"enforce_eager": False})
    engine = vllm_engine(options)
    await engine.start()
    engine.submit([GenerationRequest("a", (1, 2, 3), 8, 1.0, ())])
    made = 0
    while made < 8:
        made += sum(len(delta.token_ids) for delta in await engine.deltas())
    await engine.close()

began = time.monotonic()
asyncio.run(sample())
"""
LEARNER = """
import torch
from learner.model.policy import Policy, shard
from learner.model.ranks import join
from tests.learner.support.compiled_layers import gradients
from tests.learner.support.tiny_policy import tiny_causal_lm

began = time.monotonic()
policy = Policy(tiny_causal_lm(layers=2), temperature=1.0).eval()
gradients(shard(policy, join("cpu", threads=1).mesh, dtype=torch.float32, compiled=True), 0)
"""
COUNTED = """
import json
from torch._dynamo.utils import counters
names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
found = {name: counters["inductor"].get(name, 0) for name in names}
print(json.dumps(found | {"seconds": round(time.monotonic() - began, 1)}))
"""


class Machine:
    """A home folder, where variables name no other places."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        hidden = {*COMPILED, "XDG_CACHE_HOME"}
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment = inherited | {"HOME": str(home), "TORCH_COMPILE_DISABLE": "0"}

    def run(self, program: str, *arguments: str) -> dict[str, Any]:
        """Run a program as `nyala` starts a role, and return what inductor found and compiled."""
        begin = "import os, time; from configs.machine import compiled_folders as folders\n"
        begin += "os.environ.update(folders())\n"
        code = begin + program + COUNTED
        result: dict[str, Any] = json.loads(self._output("-c", code, *arguments).splitlines()[-1])
        return result

    def cache(self, verb: str, file: Path) -> None:
        """Call `nyala cache`."""
        print(self._output("-c", "from console.main import app; app()", "cache", verb, str(file)))

    def _output(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.mark.parametrize("role", ["engine", "learner"])
def test_a_machine_that_is_given_compiled_code_compiles_none(tmp_path: Path, role: str) -> None:
    arguments = []
    if role == "engine":  # the path of a model is part of what vLLM finds its code by
        (tmp_path / "model").mkdir()
        tiny_folder(tmp_path / "model", tied=True)
        arguments = [str(tmp_path / "model")]
    program = {"engine": ENGINE, "learner": LEARNER}[role]
    first, other, given = (Machine(tmp_path / name) for name in ("first", "other", "given"))

    cold = first.run(program, *arguments)
    again = first.run(program, *arguments)
    first.cache("pack", tmp_path / "code.tar.gz")
    without = other.run(program, *arguments)
    given.cache("unpack", tmp_path / "code.tar.gz")
    warm = given.run(program, *arguments)

    print(json.dumps({"role": role, "cold": cold, "again": again, "other": without, "given": warm}))
    for compiled in (cold, without):
        assert compiled["fxgraph_cache_miss"] > 0 == compiled["fxgraph_cache_hit"]
    for found in (again, warm):
        assert found["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"]
        assert found["fxgraph_cache_miss"] == 0
