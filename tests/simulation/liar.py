"""A simulated actor with a key that lies, by the table of `lab/endurance/lies.py`.

The checker (`history.py`) knows what it was granted: that is all that it may spoil.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from broker.client import BrokerClient
from broker.protocol.messages import Hello, LeaseReply
from broker.transport.keys import KeyPair
from configs.errors import DeadlineError, RecordError, RefusedError
from configs.hashes import run_hashes
from configs.settings import Settings
from lab.endurance.lies import PATIENCE_S, ForgedRequests, ask, targets_of
from tests.actors.support.fake_engine import CharacterTokenizer
from tests.simulation.made_up import PROMPT_TOKENS

KEY = KeyPair(b"p" * 40, b"s" * 40)


class Liar:
    """One incarnation."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        endpoints: Sequence[str],
        rng: random.Random,
        *,
        on_verdict: Callable[[str, int, int, str], None],
    ) -> None:
        self._name, self._settings, self._rng, self._on_verdict = name, settings, rng, on_verdict
        self._lies = ForgedRequests(
            rng,
            name,
            group_size=settings.run.group_size,
            at_most=settings.actors.slots,
            prompt_of=_prompt_of,
        )
        self._client = BrokerClient(
            endpoints[0],
            server_key=b"b" * 40,
            keys=KEY,
            run=settings.run.name,
            incarnation=name,
            other_endpoints=endpoints[1:],
        )

    async def live(self) -> None:
        """Lie until killed, or until the run has ended."""
        hello = Hello(
            self._name,
            host="simulated",
            pid=1,
            hashes=run_hashes(self._settings.run),
            capacity=self._settings.actors.slots,
        )
        try:
            await self._client.hello(hello, deadline_s=PATIENCE_S * 10)
            while True:
                await asyncio.sleep(self._rng.uniform(0.05, 0.5))
                try:
                    await self._lie()
                except (RefusedError, DeadlineError, RecordError):
                    continue
        finally:
            await self._client.close()

    async def _lie(self) -> None:
        for request in self._lies.next():
            reply = await ask(self._client, request)
            if isinstance(reply, LeaseReply):
                self._lies.hear(reply)
                continue
            for (task, fence), verdict in zip(targets_of(request), reply.verdicts, strict=True):
                self._on_verdict(self._name, task, fence, verdict.verdict.value)


def _prompt_of(group: int) -> Sequence[int]:
    return CharacterTokenizer().encode_prompt(f"{group:0{PROMPT_TOKENS}d}")
