"""The weight plane as processes: sidecar, actors, real ZeroMQ with CURVE, real gloo groups.

The engine is `ToyEngine`; all that lies between the learner's model and `engine.apply` is real.
"""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from broker.transport.allow_list import Role, add, revoke
from broker.transport.sockets import host_and_port
from tests.broker.support.keys import keys_with_actor
from tests.learner.support.listening import listening, listening_at
from tests.waiting import wait_until
from tests.weights.support.plane import JOIN_AND_SEND_S, MAX_PUBLISH_S

pytestmark = pytest.mark.slow


def test_ten_versions_reach_all_actors_by_one_group(plane, actors):
    plane.deliveries()

    for _ in range(10):
        manifest = plane.publish()
        for actor in actors:
            line = actor.applied(manifest)
            assert line["digest"] == manifest.digest

    deliveries = plane.deliveries(until=manifest.version)
    assert all(sent.is_complete and sent.members == 2 for sent in deliveries)
    assert len({sent.epoch for sent in deliveries}) == 1
    for actor in actors:
        assert actor.counters()["broadcasts"] >= 10
        assert actor.counters()["probe_max_diff"] < 1e-5


def test_nothing_listens_beyond_this_machine(plane, actors):
    plane.publish()

    for pid in (plane.publisher_pid, *(actor.pid for actor in actors)):
        assert listening(pid) == {"127.0.0.1"}, "a group is open, so each process listens"


def test_nobody_connects_to_a_group_that_has_met(plane, actors):
    plane.publish_to_all()
    publisher = host_and_port(plane.publication.endpoint)
    places = {
        place
        for pid in (plane.publisher_pid, *(actor.pid for actor in actors))
        for place in listening_at(pid)
    }

    assert len(places) >= 4, "the publisher's port, and one of gloo in each process"
    assert {place for place in places if is_answered(place)} == {publisher}
    again = plane.publish()
    for actor in actors:
        assert actor.applied(again)["digest"] == again.digest
        assert actor.counters()["broadcasts"] >= 2


def is_answered(place):
    try:
        socket.create_connection(place, timeout=0.5).close()
    except TimeoutError:
        return False
    return True


def test_an_actor_that_joins_late_has_the_current_weights_first(plane, actors):
    manifest = plane.publish_to_all()

    late = plane.actor("late")
    synced = late.wait("synced")

    assert synced["version"] == manifest.version
    assert late.lines[0]["version"] == manifest.version
    assert late.counters()["pulls"] == 1
    following = plane.publish()
    for actor in (late, *actors):
        actor.applied(following)
    assert late.counters()["broadcasts"] == 1
    late.end()


def is_running(pid):
    """Say whether a process is neither stopped nor dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "TZ"


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_struck_down_in_a_send_delays_nobody_beyond_the_deadline(plane, actors, strike):
    victim = plane.actor(f"victim-{strike.name}", strike=strike, nth=2)
    victim.wait("synced")
    first = plane.publish()
    for actor in (victim, *actors):
        actor.applied(first)
    plane.slowest_publish_s = 0.0

    started = time.monotonic()
    manifest = plane.publish()  # the victim enters this broadcast and goes no further
    wait_until(  # a newer version would take the place of one not begun
        lambda: not is_running(victim.pid),
        "the victim is not in a broadcast",
        timeout_s=JOIN_AND_SEND_S,
        every_s=0.001,
    )
    for _ in range(5):
        newest = plane.publish()

    for actor in actors:
        actor.applied(newest, timeout_s=2 * JOIN_AND_SEND_S)
    assert time.monotonic() - started < JOIN_AND_SEND_S + 2.0
    assert plane.slowest_publish_s < MAX_PUBLISH_S
    sent = plane.deliveries(until=newest.version)
    assert [s.is_complete for s in sent if s.version == manifest.version] == [False]
    if strike is signal.SIGSTOP:
        os.kill(victim.pid, signal.SIGCONT)
        victim.applied(newest, timeout_s=3 * JOIN_AND_SEND_S)
    victim.end()


def test_a_corrupt_broadcast_is_replaced_by_a_pull_before_it_reaches_an_engine(plane, actors):
    unlucky = plane.actor("unlucky", strike="corrupt", nth=2)
    unlucky.wait("synced")
    unlucky.applied(plane.publish())

    manifest = plane.publish()

    for actor in (unlucky, *actors):
        assert actor.applied(manifest)["digest"] == manifest.digest
    counters = unlucky.counters()
    assert (counters["broadcasts"], counters["pulls"]) == (1, 2)
    unlucky.end()


def test_a_dead_publisher_is_replaced_and_offers_the_newest_version_again(plane, actors):
    before = plane.publish()
    for actor in actors:
        actor.applied(before)
    endpoint = plane.publication.endpoint

    os.kill(plane.publisher_pid, signal.SIGKILL)

    late = plane.actor("after-the-death", timeout_s=30.0)
    assert late.wait("synced", timeout_s=30.0)["version"] == before.version
    late.end()
    during = plane.publish()
    for actor in actors:
        actor.applied(during, timeout_s=30.0)
    assert plane.slowest_publish_s < MAX_PUBLISH_S
    assert plane.publication.endpoint == endpoint
    after = plane.publish()
    for actor in actors:
        actor.applied(after)


def test_an_unknown_key_gets_nothing(plane, tmp_path):
    keys_with_actor(tmp_path / "keys")

    stranger = plane.actor("stranger", keys=tmp_path / "keys", timeout_s=1.0)

    failed = stranger.wait("failed")
    assert failed["kind"] == "DeadlineError"
    assert "that this actor's key is in the learner's keys/allowed" in failed["text"]
    stranger.end()


def test_only_actors_on_the_list_are_served_weights(plane, actors):
    add(plane.keys, "watcher", Role.OBSERVER)
    add(plane.keys, "spot", Role.ACTOR)
    watcher = plane.actor("watcher", key="watcher", timeout_s=1.0)
    spot = plane.actor("spot", key="spot")
    assert watcher.wait("failed", timeout_s=60.0)["kind"] == "DeadlineError"
    spot.wait("synced", timeout_s=60.0)

    revoke(plane.keys, "spot")
    time.sleep(1.5)  # the publisher looks at its list every second
    withheld = plane.publish()
    for actor in actors:
        actor.applied(withheld)

    spot.counters()  # reads what it has said
    assert withheld.version not in [line.get("version") for line in spot.lines]
    watcher.end()
    spot.end()


def test_an_actor_of_another_run_gets_nothing(plane):
    stranger = plane.actor("other", run="another", timeout_s=1.0)

    assert stranger.wait("failed")["kind"] == "DeadlineError"
    stranger.end()


def test_a_probe_that_disagrees_once_is_cured_by_pulling_again(plane):
    plane.publish_to_all()

    actor = plane.actor("once", spoil=1)

    actor.wait("synced")
    assert actor.counters()["probe_mismatches"] == 1
    assert actor.counters()["pulls"] == 2
    actor.end()


def test_a_probe_that_disagrees_twice_is_cured_by_pulling_a_second_time(plane):
    plane.publish()

    actor = plane.actor("twice", spoil=2)

    actor.wait("synced")
    counters = actor.counters()
    assert (counters["probe_mismatches"], counters["pulls"]) == (2, 3)
    actor.end()


def test_a_probe_that_disagrees_three_times_ends_an_actor_without_a_judge(plane):
    plane.publish()

    actor = plane.actor("thrice", spoil=3)

    failed = actor.wait("failed")
    assert failed["kind"] == "WeightsError"
    assert failed["text"].startswith("log-probs of the probe under weights ")
    assert ", 3 times in a row; set actors.probe_tolerance above" in failed["text"]
    actor.end()


def test_a_tensor_that_lags_by_a_millionth_is_found_and_cured_by_pulling_again(plane):
    plane.publish_to_all()

    actor = plane.actor("lags", lag=1)

    actor.wait("synced")
    counters = actor.counters()
    assert (counters["probe_mismatches"], counters["storage_mismatches"]) == (0, 1)
    assert counters["pulls"] == 2
    assert counters["read_backs"] >= 2, "the second one although the first was just before"
    actor.end()


def test_a_tensor_that_lags_twice_ends_the_actor(plane):
    plane.publish()

    actor = plane.actor("lags-on", lag=2)

    failed = actor.wait("failed")
    assert failed["kind"] == "WeightsError"
    assert "got others twice in a row" in failed["text"]
    assert "than it was given, in ['mix.bias'] (1 in all)" in failed["text"]
    actor.end()


def test_weights_of_a_lower_lineage_are_refused(plane, actors):
    newer = plane.publish(lineage=2)
    for actor in actors:
        actor.applied(newer)

    refused = plane.publish(lineage=1)
    newest = plane.publish(lineage=2)

    for actor in actors:
        actor.applied(newest)
        applied = [line["version"] for line in actor.lines if line["event"] == "applied"]
        assert refused.version not in applied
        assert applied == sorted(applied)
