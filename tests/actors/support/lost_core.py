"""A stepper whose model is a process, as vLLM's core on a GPU, without a model.

The process only sleeps: what a test says it has made is put into the queue of outputs. vLLM's own
client is `SimpleNamespace`s here, of the attributes that `vllm_private.py` uses;
`test_vllm_private.py` holds those against vLLM.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from actors.engine.engine import GenerationRequest, Sampled, StagedWeights
from actors.engine.vllm_engine import CoreWatch
from actors.engine.vllm_private import CoreClient


class Process:
    """A process that sleeps, with what multiprocessing says of one."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import signal; signal.pause()"]
        )
        self.pid = self._child.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self) -> int | None:
        return self._child.poll()

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


class CoreStepper:
    """Returns what the test puts into `outputs`, until its process ends."""

    vocabulary = 64

    def __init__(self) -> None:
        self.process = Process()
        self.outputs: queue.Queue[list[Sampled] | Exception] = queue.Queue()
        self.calls: dict[int, Future[Any]] = {}
        self.resources = SimpleNamespace(
            engine_dead=False, engine_manager=SimpleNamespace(processes=[self.process])
        )
        reader = threading.Thread(target=lambda: None)
        reader.start()
        client = SimpleNamespace(
            resources=self.resources,
            output_queue_thread=reader,
            outputs_queue=self.outputs,
            utility_results=self.calls,
        )
        self.unsent: list[Sampled] = []
        """Made, and not returned by any step."""
        self.admitted: list[int] = []
        self.is_closed = False
        self._client = cast(CoreClient, client)
        self._watch: CoreWatch

    def start(self) -> None:
        self._watch = CoreWatch(self._client)

    @property
    def has_work(self) -> bool:
        return bool(self.admitted)

    def admit(self, key: int, request: GenerationRequest, max_tokens: int) -> None:
        self.admitted.append(key)

    def cancel(self, keys: list[int]) -> None:
        pass

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        self.admitted.append(key)

    def step(self) -> Iterable[Sampled]:
        made = self.outputs.get()
        if isinstance(made, Exception):
            raise made
        yield from made

    def pause(self) -> Iterable[Sampled]:
        """Call the core, as vLLM does: nothing answers here."""
        answer: Future[None] = Future()
        self.calls[0] = answer
        answer.result()
        yield from ()

    def resume(self) -> None:
        pass

    def prepare(self, staged: StagedWeights) -> bool:
        return True

    def is_prepared(self, staged: StagedWeights) -> bool:
        return True

    def load(self, staged: StagedWeights) -> None:
        pass

    def read_back(
        self, staged: StagedWeights, moved: Callable[[], object] = lambda: None
    ) -> list[str] | None:
        return None

    def check_health(self) -> None:
        self._watch.check_processes()

    def rest(self) -> Iterable[Sampled]:
        self._watch.settle()
        while not self.outputs.empty():
            made = self.outputs.get()
            if not isinstance(made, Exception):
                yield from made
        yield from self.unsent

    def kill(self) -> None:
        self._watch.kill()

    def close(self) -> None:
        self.is_closed = True
        self._watch.close()
        self.process.close()
