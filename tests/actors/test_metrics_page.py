"""An actor's page: the figures of its parts, and when it is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.loop import ActorPhase
from actors.metrics_page import METRICS, ActorPage
from actors.weights.counters import WeightCounters
from broker.protocol.messages import Figures
from buffer.record.episode import PolicyVersion
from configs.metrics import CARD_METRICS, BusyTime
from configs.settings import BrokerSettings


class Actor:
    """The parts that a page reads; stand-ins, as it only reads them."""

    def __init__(self) -> None:
        self.figures = Figures()
        sampling = SimpleNamespace(totals=lambda: self.figures, busy=BusyTime())
        self.heartbeat = SimpleNamespace(silent_s=0.0)
        self.loop = SimpleNamespace(
            phase=ActorPhase.SERVING,
            sampling=sampling,
            heartbeat=self.heartbeat,
            room=SimpleNamespace(most=17),
        )
        self.receiver = SimpleNamespace(is_dirty=False, counters=WeightCounters(updates=3))
        engine: Any = SimpleNamespace(version=PolicyVersion(2, 7))
        settings: Any = SimpleNamespace(broker=BrokerSettings())
        loop: Any = self.loop
        self.page = ActorPage(loop, engine, self.receiver, settings)


def test_a_page_shows_what_the_parts_count() -> None:
    actor = Actor()
    actor.figures = Figures(tokens=12.0, finished=4.0, in_flight=2.0)

    values = actor.page.values()

    of_cards = {metric.name for metric in CARD_METRICS}  # none here, or one that has a driver
    assert set(values) - of_cards == {metric.name for metric in METRICS} - of_cards
    assert values["nyala_actor_sampled_tokens_total"] == 12
    assert values["nyala_actor_policy_step"] == 7
    assert values["nyala_actor_weight_updates_total"] == 3


@pytest.mark.parametrize(
    ("phase", "dirty", "silent_s", "figures", "waits_for"),
    [
        (ActorPhase.JOIN, False, 0.0, Figures(), "its start"),
        (ActorPhase.SYNC, True, 0.0, Figures(), "its first weights"),
        (ActorPhase.SERVING, True, 0.0, Figures(tokens=5.0), "weights"),
        (ActorPhase.SERVING, False, 7.0, Figures(tokens=5.0), "the broker"),
        (ActorPhase.SERVING, False, 1.0, Figures(in_flight=3.0), "its first tokens"),
        (ActorPhase.SERVING, False, 1.0, Figures(), None),  # only for work
        (ActorPhase.SERVING, False, 1.0, Figures(in_flight=3.0, tokens=5.0), None),
        (ActorPhase.DRAINING, False, 1.0, Figures(tokens=5.0), "its end"),
    ],
)
def test_an_actor_is_ready_when_it_waits_for_nothing_but_work(
    phase: ActorPhase, dirty: bool, silent_s: float, figures: Figures, waits_for: str | None
) -> None:
    actor = Actor()
    actor.loop.phase, actor.receiver.is_dirty = phase, dirty
    actor.heartbeat.silent_s, actor.figures = silent_s, figures

    expected = None if waits_for is None else f"waits for {waits_for}"
    assert actor.page.health.not_ready() == expected
