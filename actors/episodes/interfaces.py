"""Interfaces of the broker's client and the weight receiver, as the episode loop uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from broker.protocol.conversation_messages import (
    CallsReply,
    ListenRequest,
    SayRequest,
    WantRequest,
)
from broker.protocol.messages import (
    BeatRequest,
    FailRequest,
    Hello,
    LeaseReply,
    LeaseRequest,
    Publication,
    ReleaseRequest,
    SubmitRequest,
    Verdicts,
    Welcome,
)
from buffer.record.episode import PolicyVersion


class DeliveryClient(Protocol):
    """The calls of the broker's client that end the work on a task."""

    async def submit(self, request: SubmitRequest, *, deadline_s: float) -> Verdicts: ...

    async def fail(self, request: FailRequest, *, deadline_s: float) -> Verdicts: ...


class MailboxClient(Protocol):
    """The calls of the broker's client that are about live agents."""

    async def want(self, request: WantRequest, *, deadline_s: float) -> Verdicts: ...

    async def listen(self, request: ListenRequest, *, deadline_s: float) -> CallsReply: ...

    async def say(self, request: SayRequest, *, deadline_s: float) -> Verdicts: ...


class BrokerApi(DeliveryClient, MailboxClient, Protocol):
    """`broker.client.BrokerClient`: every call is repeated until its deadline.

    Calls but `bye` raise `DeadlineError` without an answer by then, and `RefusedError` where the
    broker refuses. `until_gone` waits until no broker has been connected for so many seconds.
    """

    async def hello(self, hello: Hello, *, deadline_s: float) -> Welcome: ...

    async def lease(self, request: LeaseRequest, *, deadline_s: float) -> LeaseReply: ...

    async def beat(self, request: BeatRequest, *, deadline_s: float) -> Verdicts: ...

    async def release(self, request: ReleaseRequest, *, deadline_s: float) -> Verdicts: ...

    async def bye(self, *, has_failed: bool, deadline_s: float) -> None: ...

    async def until_gone(self, after_s: float) -> None: ...


class Weights(Protocol):
    """The calls of `actors.weights.receiver.WeightReceiver` that the actor's loop uses."""

    @property
    def is_dirty(self) -> bool:
        """Whether the engine's weights belong to no version."""
        ...

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures of the last weight version for heartbeats, by their names in `Figures`."""
        ...

    def offer(self, publication: Publication | None) -> None:
        """Follow the publisher to its newest address; None changes nothing."""
        ...

    async def first_sync(self, publication: Publication) -> PolicyVersion:
        """Wait until the engine serves this version or a newer one, and return that.

        Raises:
            DeadlineError: Its bytes do not come.
        """
        ...

    async def newer_than(self, version: PolicyVersion) -> None:
        """Wait until the engine has a version above this one."""
        ...

    async def run(self) -> None:
        """Receive and apply weights until cancelled; raises as `WeightReceiver.run`."""
        ...
