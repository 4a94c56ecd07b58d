"""A network partition, made by the kernel, between the publisher and one actor in a group."""

import os
import signal
import time
from pathlib import Path

import pytest

from lab.faults.network import SecondNetwork
from tests.needs import skip_without
from tests.waiting import wait_until
from tests.weights.support.plane import JOIN_AND_SEND_S, MAX_PUBLISH_S, SLACK_S, Plane

pytestmark = pytest.mark.slow

RECONNECT_S = 10.0
"""A dead connection is found by heartbeats in 6 s, and made again within 2 s."""


@pytest.fixture(scope="module")
def network():
    skip_without("a second network")
    with SecondNetwork() as made:
        yield made


@pytest.fixture
def plane(network, tmp_path):
    endpoint = f"tcp://{network.here}:0"
    plane = Plane(tmp_path, ballast=100_000, publisher_endpoint=endpoint, trusted_network=True)
    try:
        plane.publish()
        yield plane
    finally:
        plane.close()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_an_actor_cut_off_during_a_send_delays_nobody_and_catches_up(plane, network):
    near = [plane.actor(name) for name in ("a", "b")]
    for actor in near:
        actor.wait("synced", timeout_s=60.0)
    plane.wait_until_groups_are_possible()
    # It stops inside its second collective, so that the link is cut while it receives.
    far = plane.actor("far", network=network.name, strike=signal.SIGSTOP, nth=2)
    far.wait("synced", timeout_s=60.0)
    manifests = [plane.publish()]
    for actor in (*near, far):
        actor.applied(manifests[0])
    plane.slowest_publish_s = 0.0

    manifests.append(plane.publish())
    wait_until(lambda: is_stopped(far.pid), "it never entered the send", timeout_s=JOIN_AND_SEND_S)
    network.cut()
    os.kill(far.pid, signal.SIGCONT)
    began = time.monotonic()
    manifests += [plane.publish() for _ in range(2)]
    for actor in near:
        actor.applied(manifests[-1], timeout_s=2 * JOIN_AND_SEND_S + SLACK_S)
    near_s = time.monotonic() - began

    network.heal()
    began = time.monotonic()
    manifests += [plane.publish() for _ in range(2)]
    for actor in (*near, far):
        actor.applied(manifests[-1], timeout_s=RECONNECT_S + 2 * JOIN_AND_SEND_S + SLACK_S)
    far_s = time.monotonic() - began

    assert plane.slowest_publish_s < MAX_PUBLISH_S
    digests = {manifest.version: manifest.digest for manifest in manifests}
    applied = [line for line in far.lines if line["event"] == "applied"]
    found = {line["version"]: line["digest"] for line in applied if line["version"] in digests}
    assert found.items() <= digests.items()
    assert [line["version"] for line in applied] == sorted({line["version"] for line in applied})
    print(
        f"\n| an actor cut off during a send by a partition | "
        f"{1e3 * plane.slowest_publish_s:.0f} ms | {near_s:.1f} s for the others, "
        f"{far_s:.1f} s for it once the network is whole |"
    )
