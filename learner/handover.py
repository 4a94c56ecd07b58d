"""Handing weights over while the next batch is claimed and packed, which need no model.

    step k ─▶ begin ──────────── gather, probe, seal, announce ───────────▶ │ wait ─▶ step k + 1
                    └─▶ write down, claim batch k + 1, read and pack it ──▶ │

In a thread, on every rank: what ranks say to each other there goes over the group of the model's
mesh, which nobody else uses meanwhile. Between `begin` and `wait` the model belongs to it.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from configs.errors import DeadlineError

SWITCH_S = 5e-4
"""How soon the interpreter passes from claiming to publishing, whose many short operations each ask
for it anew: at Python's 5 ms, 20 ms of work take 100."""
DEADLINE_S = 1200.0
"""Twice that of a collective: whatever hangs in there has said so before."""


class Handover:
    """Runs one publication at a time in a thread of its own.

    Example:
        handover = Handover(ranks.device)
        handover.begin(lambda: publisher.publish(model, version))
        batch = claim()
        waited_s = handover.wait()
        handover.close()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._publication: Future[None] | None = None

    def begin(self, publish: Callable[[], object]) -> None:
        """Have this done; the last one must have been waited for."""
        assert self._publication is None, "a publication must be waited for before the next"
        publication: Future[None] = Future()
        self._publication = publication
        context = contextvars.copy_context()  # whose words our log lines carry
        # A daemon: one that hangs must not keep a process from ending that has given it up.
        threading.Thread(
            target=context.run,
            args=(self._carry_out, publish, publication),
            name="handover",
            daemon=True,
        ).start()

    def wait(self) -> float:
        """Wait until the model is free again; returns for how long, in seconds.

        Raises:
            DeadlineError: the publication hangs.
            Exception: whatever ended it, such as `LostLineage`.
        """
        publication, self._publication = self._publication, None
        if publication is None:
            return 0.0
        began = time.monotonic()
        if not wait([publication], DEADLINE_S).done:
            raise DeadlineError(
                f"weights must be handed over within {DEADLINE_S:.0f} s, and were not; look at "
                "the other ranks' logs"
            )
        publication.result()
        return time.monotonic() - began

    def close(self) -> None:
        """Let what has begun end; its outcome no longer matters to anybody."""
        if self._publication is not None:
            wait([self._publication], DEADLINE_S)

    def _carry_out(self, publish: Callable[[], object], publication: Future[None]) -> None:
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread begins with the first
            publish()
        except BaseException as error:  # noqa: BLE001 - the main thread's to raise
            sys.setswitchinterval(usual_s)
            publication.set_exception(error)
        else:
            sys.setswitchinterval(usual_s)
            publication.set_result(None)
