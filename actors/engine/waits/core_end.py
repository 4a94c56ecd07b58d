"""End of vLLM's core in a process of its own, and what waits for that core.

vLLM looks at the process and stops reading its socket once it is gone, but nobody ends a wait for
outputs or for the answer of a call: `LLMEngine.step` would never return. `CoreWatch` ends them.

    core runs --SIGKILL, SIGABRT, out of memory--> all it sent is in the queue of outputs
              --> an error behind it, and in every call --> whoever waits raises it
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing import connection

from actors.engine.vllm_private import OUTPUTS_S, CoreClient, core_processes, end_waits
from configs.errors import EngineDied
from configs.worker import Worker

SETTLE_S = 2 * OUTPUTS_S
"""More than `end_waits` takes."""


class CoreWatch:
    """Watches the processes of one core from a thread of its own.

    Args:
        client: vLLM's client of the core.
    """

    def __init__(self, client: CoreClient) -> None:
        self._client = client
        # Kept here: the sentinel of a process that is collected would be another file's number.
        self._processes = core_processes(client)
        self._is_closing = False
        self._worker = Worker(self._watch, name="core-watch").start()

    def check(self) -> None:
        """Look at the processes.

        Raises:
            EngineDied: One has ended.
        """
        self._worker.check()
        if self._ended(timeout_s=0):
            raise self._death()

    def settle(self) -> None:
        """Wait until all that a core sent before it ended is in the queue of outputs."""
        if self._ended(timeout_s=0):
            self._worker.join(SETTLE_S)

    def kill(self) -> None:
        """End a core that hangs; what waits for it ends as after any other death."""
        for process in self._processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Expect the end of the core from now on."""
        self._is_closing = True

    def _watch(self) -> None:
        self._ended(timeout_s=None)
        if not self._is_closing:
            end_waits(self._client, self._death())

    def _ended(self, *, timeout_s: float | None) -> bool:
        sentinels = [process.sentinel for process in self._processes]
        return bool(connection.wait(sentinels, timeout_s))

    def _death(self) -> EngineDied:
        codes = [process.exitcode for process in self._processes]
        how = next((f" with code {code}" for code in codes if code is not None), "")
        return EngineDied(
            f"the process of vLLM's core must run, got its end{how}; look for a full memory or a "
            "lost GPU in the machine's log"
        )
