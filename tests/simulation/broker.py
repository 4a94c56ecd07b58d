"""A simulated broker: the real server between a socket and a store in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from broker.server.server import Broker
from broker.transport.allow_list import TAG, AllowList, AllowListEntry, Role
from configs.settings import Settings
from tests.simulation.event_loop import current_process
from tests.simulation.network import Network
from tests.simulation.store import BrokersStore, Server


class Everybody(AllowList):
    """CURVE is not simulated: every peer is of this run, and its route names its role."""

    def member(self, public_key: bytes) -> AllowListEntry | None:
        role = Role.HOST if public_key.startswith(b"host") else Role.ACTOR
        return AllowListEntry(str(role), role, public_key.decode()[:TAG])

    def refresh(self) -> None:
        """There are no files to look at."""


async def serve(
    settings: Settings,
    server: Server,
    network: Network,
    endpoint: str,
    keys: Path,
) -> None:
    """Serve until the process is killed."""
    owner = current_process()
    assert owner is not None
    broker = Broker(settings, BrokersStore(server, settings.run.name), keys=keys)
    router: Any = network.bind(endpoint, owner)
    authenticator: Any = SimpleNamespace(allowed=Everybody(keys), check_zap_thread=lambda: None)
    await broker._serve(router, authenticator, asyncio.Event())
