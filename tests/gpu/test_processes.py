"""Processes that are started after CUDA was asked about: new programs can use it, forks cannot.

`tests/packaging/test_new_programs.py` shows on a CPU that all of ours are new programs, but
those of the fork server and vLLM's core, whose parents must not have met CUDA.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import torch
import uvloop

from console.run.plan import THREAD_VARIABLES

pytestmark = pytest.mark.gpu

USE = "import torch; print(int(torch.ones(3, device='cuda').sum()))"
FORK = """
import multiprocessing, torch
assert torch.cuda.is_available()
def use():
    torch.ones(3, device="cuda")
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
print(child.exitcode)
"""


LIBRARIES = """
import os, sys
from importlib import import_module
from actors.engine.choice import import_libraries
from console.run import fork_process
for name in fork_process.BOTH:
    import_module(name)
import_libraries(sys.argv[1])
from configs import forks
print("threads of libraries:", [
    (thread, open(f"/proc/self/task/{thread.number}/wchan").read())
    for thread in forks.other_threads()
], file=sys.stderr)
print(forks.fault_of_forks() or "may be forked", flush=True)
import torch
if not os.fork():
    print(int(torch.ones(3, device="cuda").sum()), forks.has_met_cuda(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_fork_of_what_imports_the_libraries_of_a_run_uses_the_card(engine: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIBRARIES, engine],
        env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1"),  # as `nyala up` starts it
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    print(done.stderr)  # which threads there were, where somebody asks for the output of tests
    assert done.stdout == "may be forked\n3 True\n", done.stderr


def test_a_new_program_uses_the_card_that_its_parent_uses() -> None:
    assert int(torch.ones(3, device="cuda").sum()) == 3

    done = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, check=False, timeout=120
    )

    assert done.stdout == "3\n", done.stderr


def test_a_new_program_of_an_actors_event_loop_does_so_too() -> None:
    assert torch.cuda.is_available()

    async def start() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", USE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        return (await process.communicate())[0]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(start()) == b"3\n"


def test_a_fork_after_the_question_cannot() -> None:
    """What all this is for; where torch learns to, this test may go."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=120
    )

    assert "Cannot re-initialize CUDA in forked subprocess" in done.stderr
    assert done.stdout == "1\n"
