"""Cost of each fault: one learner, four actors in processes of their own, real gloo and CURVE.

Two actors survive every story, two are its victims. Each test holds that the learner was never held
up, and that whoever lives has the newest version within two publications after the deadlines of a
weight group. `pytest -s` prints the table of docs/weights.md.
"""

import os
import signal
import time

import pytest
from msgspec import structs

from benchmarks.support.uplink import Uplink
from tests.weights.support.plane import JOIN_AND_SEND_S, MAX_PUBLISH_S, SLACK_S

pytestmark = pytest.mark.slow

ROWS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _table():
    yield
    print("\n| fault | learner held up | newest weights everywhere after |\n| --- | --- | --- |")
    print("\n".join(ROWS))


@pytest.fixture
def victims(plane, actors, request):
    """Actors that are struck as the test asks: in their second collective, or not by themselves."""
    strike = getattr(request, "param", {})
    made = [plane.actor(f"{request.node.name}-{i}", **strike) for i in range(2)]
    for victim in made:
        victim.wait("synced", timeout_s=60.0)
    first = plane.publish()
    for actor in (*made, *actors):
        actor.applied(first)
    plane.slowest_publish_s = 0.0
    yield made
    for victim in made:
        victim.end()


def signalled(victims, number) -> None:
    for victim in victims:
        os.kill(victim.pid, number)


def holds(plane, living, fault: str, *, publications: int = 2, patience_s: float = 0.0) -> None:
    """Publish, and see that all the living follow; note what it took."""
    began = time.monotonic()
    for _ in range(publications):
        newest = plane.publish()
    for actor in living:
        actor.applied(newest, timeout_s=2 * JOIN_AND_SEND_S + patience_s + SLACK_S)
    took_s = time.monotonic() - began
    assert plane.slowest_publish_s < MAX_PUBLISH_S
    ROWS.append(f"| {fault} | {1e3 * plane.slowest_publish_s:.0f} ms | {took_s:.1f} s |")


def test_nothing(plane, actors, victims):
    holds(plane, (*actors, *victims), "none")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_two_actors_struck_before_a_send(plane, actors, victims, number, request):
    signalled(victims, number)

    holds(plane, actors, f"two actors {request.node.callspec.id} before a send")


IN_COLLECTIVE = [
    {"strike": signal.SIGKILL, "nth": 2},
    {"strike": signal.SIGSTOP, "nth": 2},
]


@pytest.mark.parametrize("victims", IN_COLLECTIVE, indirect=True, ids=["killed", "stopped"])
def test_two_actors_struck_at_once_during_a_send(plane, actors, victims, request):
    holds(plane, actors, f"two actors {request.node.callspec.id} at once during a send")


def test_an_actor_killed_after_a_send(plane, actors, victims):
    manifest = plane.publish()
    victims[0].applied(manifest)
    signalled(victims[:1], signal.SIGKILL)

    holds(plane, (*actors, victims[1]), "actor killed after a send")


def test_a_stopped_actor_that_comes_back_catches_up(plane, actors, victims):
    signalled(victims, signal.SIGSTOP)
    for _ in range(2):
        missed = plane.publish()
    for actor in actors:
        actor.applied(missed, timeout_s=JOIN_AND_SEND_S + SLACK_S)
    signalled(victims, signal.SIGCONT)

    holds(plane, (*actors, *victims), "two actors that were stopped go on", publications=1)


@pytest.mark.parametrize("victims", IN_COLLECTIVE[1:], indirect=True, ids=["stopped"])
def test_the_publisher_killed_during_a_send(plane, actors, victims):
    plane.publish()  # hangs on the victims
    time.sleep(0.5)
    os.kill(plane.publisher_pid, signal.SIGKILL)

    # Survivors notice at their own deadlines, or by the next publisher's news.
    holds(plane, actors, "publisher killed during a send", patience_s=25.0)
    plane.wait_until_groups_are_possible()


@pytest.mark.parametrize("victims", IN_COLLECTIVE[1:], indirect=True, ids=["stopped"])
def test_an_actor_that_joins_during_a_send(plane, actors, victims):
    manifest = plane.publish()  # hangs on the victims
    late = plane.actor("late-in-a-send")

    assert late.wait("synced", timeout_s=30.0)["version"] >= manifest.version
    holds(plane, (*actors, late), "actor joins during a send that hangs")
    late.end()


@pytest.mark.parametrize("victims", [{"strike": "corrupt", "nth": 2}], indirect=True, ids=[""])
def test_corrupt_buckets(plane, actors, victims):
    holds(plane, (*actors, *victims), "buckets corrupted at two actors")

    assert sum(victim.counters()["pulls"] for victim in victims) >= 2


def test_an_actor_behind_a_slow_link_holds_nobody_up(plane, actors):
    with Uplink(plane.publication.endpoint, bytes_per_s=300_000) as link:
        behind = structs.replace(plane.publication, endpoint=link.endpoint)
        far = plane.actor("far", publication=behind, timeout_s=60.0)
        plane.slowest_publish_s = 0.0

        holds(plane, actors, "an actor pulls over a link of 300 KB/s")

        assert far.wait("synced", timeout_s=60.0)["version"]
        far.end()
