"""Hearing and answering live agents beside the actor's other work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.episodes import agent_mail
from actors.episodes.agent_mail import AgentMail
from actors.episodes.sampling import Sampling
from broker.protocol.conversation_messages import WantRequest
from broker.protocol.messages import TaskVerdict, Verdict, Verdicts


class Mail:
    """Brings calls of three conversations at once, and then no more."""

    def __init__(self) -> None:
        self.news = [[(name, "calls") for name in "abc"]]

    async def listen(self) -> list[tuple[str, str]]:
        return self.news.pop() if self.news else await asyncio.Future()


def test_heartbeats_go_on_between_conversations_that_are_read_after_a_death() -> None:
    done: list[str] = []
    sampling = object.__new__(Sampling)
    sampling._mail = Mail()  # type: ignore[assignment]
    sampling._take_calls = lambda held, calls: done.append(str(held))  # type: ignore[method-assign]

    async def beat() -> None:
        hearing = asyncio.create_task(sampling.hear_agents())
        for number in range(4):
            await asyncio.sleep(0)
            done.append(str(number))
        hearing.cancel()

    asyncio.run(beat())

    assert done == ["a", "0", "b", "1", "c", "2", "3"]


class Talking(SimpleNamespace):
    """What the mail reads of a lease whose agent waits for a reply."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def talking(task_id: int, *, payload: bytes = b"") -> Any:
    rollout = SimpleNamespace(replies={1: b"reply"}, conversation=SimpleNamespace(payload=payload))
    lease = SimpleNamespace(task_id=task_id, fence=1)
    return Talking(lease=lease, has_ended=False, agent=lambda: rollout)


def mail_by(broker: object) -> AgentMail:
    return AgentMail(cast(Any, broker), cast(Any, None), cast(Any, None), deadline_s=1.0)


def test_a_reply_does_not_wait_behind_one_that_the_store_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        mail, sent = mail_by(None), list[int]()

        def refused() -> list[Any]:
            sent.append(len(sent))
            return []

        monkeypatch.setattr(mail, "_letters", refused)
        for again_s, is_new in ((60.0, True), (60.0, True), (0.05, False)):
            monkeypatch.setattr(agent_mail, "AGAIN_S", again_s)
            if is_new:
                mail.put_replies(talking(len(sent)))
            await asyncio.wait_for(mail.say(), 10)
        assert len(sent) == 3

    asyncio.run(story())


def test_what_agents_are_told_goes_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = list[WantRequest]()

    class Broker:
        async def want(self, request: WantRequest, *, deadline_s: float) -> Verdicts:
            requests.append(request)
            verdicts = {2: Verdict.OUTDATED}
            ids = [want.task_id for want in request.wants]
            return Verdicts(tuple(TaskVerdict(i, verdicts.get(i, Verdict.OK)) for i in ids))

    async def story() -> None:
        mail = mail_by(Broker())
        for task_id in (1, 2, 3):
            mail.begin(talking(task_id, payload=b"a" * 400))

        (lost,) = await asyncio.wait_for(mail.listen(), 10)

        assert (lost[0].lease.task_id, lost[1].verdict) == (2, Verdict.OUTDATED)

    monkeypatch.setattr(agent_mail, "MAX_CHUNK_BYTES", 1000)
    asyncio.run(story())
    assert [[want.task_id for want in request.wants] for request in requests] == [[1, 2], [3]]
