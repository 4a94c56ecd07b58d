"""The state machine of weight epochs, with a clock that only the test moves."""

import pytest

from broker.protocol.weight_messages import SILENT_AFTER_S
from buffer.record.episode import PolicyVersion
from learner.weights.epochs import MAX_STRIKES, MAX_TRIES, READY_SHARE, EpochPhase, WeightEpochs

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
JOIN_S, SEND_S = 10.0, 30.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def epochs(clock):
    epochs = WeightEpochs(join_s=JOIN_S, send_s=SEND_S, clock=clock)
    for actor in ("a", "b"):
        epochs.on_join(actor, can_group=True)
    return epochs


def phase_of(epochs: WeightEpochs) -> EpochPhase:
    return epochs.phase


def deliver(epochs, version, actors=("a", "b")):
    membership = epochs.begin_epoch(version)
    for actor in actors:
        epochs.ready(actor, membership.number)
    for actor in actors:
        epochs.acked(actor, membership.number)
    return membership


def test_an_epoch_is_done_when_all_are_ready_and_have_confirmed(epochs):
    membership = epochs.begin_epoch(V1)
    assert membership.members == ("a", "b")
    assert membership.fresh

    epochs.ready("a", membership.number)
    assert phase_of(epochs) is EpochPhase.FORMING
    epochs.ready("b", membership.number)
    assert phase_of(epochs) is EpochPhase.SENDING

    epochs.acked("a", membership.number)
    assert phase_of(epochs) is EpochPhase.SENDING
    epochs.acked("b", membership.number)
    assert phase_of(epochs) is EpochPhase.DONE


def test_an_unchanged_membership_keeps_its_group(epochs):
    first, second = deliver(epochs, V1), epochs.begin_epoch(V2)

    assert second.number == first.number
    assert not second.fresh


def test_a_newcomer_means_a_new_group(epochs):
    first = deliver(epochs, V1)
    epochs.on_join("c", can_group=True)

    second = epochs.begin_epoch(V2)

    assert second.members == ("a", "b", "c")
    assert second.fresh
    assert second.number == first.number + 1


def test_who_is_silent_or_cannot_group_is_no_member(epochs, clock):
    clock.now += SILENT_AFTER_S + 0.1
    epochs.on_join("b", can_group=True)
    epochs.on_join("c", can_group=False)

    assert epochs.begin_epoch(V1).members == ("b",)
    assert epochs.live() == ("b", "c")


def test_nobody_to_send_to_changes_nothing(epochs, clock):
    clock.now += SILENT_AFTER_S + 0.1

    assert epochs.begin_epoch(V1) is None
    assert phase_of(epochs) is EpochPhase.IDLE


def test_a_member_that_is_not_ready_is_left_out_and_the_others_try_again(epochs, clock):
    first = epochs.begin_epoch(V1)
    epochs.ready("a", first.number)
    clock.now += JOIN_S * READY_SHARE

    assert epochs.expire() == ("b",)
    second = epochs.retry()

    assert second.members == ("a",)
    assert second.number == first.number + 1
    assert MAX_TRIES == 2
    clock.now += JOIN_S * READY_SHARE
    assert epochs.expire() == ("a",)
    assert epochs.retry() is None


def test_a_silent_member_is_one_again_with_its_next_join(epochs, clock):
    epochs.begin_epoch(V1)
    clock.now += JOIN_S
    epochs.expire()
    assert epochs.live() == ()

    epochs.on_join("b", can_group=True)

    assert epochs.begin_epoch(V2).members == ("b",)


def test_a_broken_send_is_never_followed_by_the_same_group(epochs):
    first = deliver(epochs, V1)
    second = epochs.begin_epoch(V2)
    for actor in ("a", "b"):
        epochs.ready(actor, second.number)

    assert epochs.broke(second.number) == ("a", "b")
    third = epochs.begin_epoch(V3)

    assert first.number == second.number
    assert third.fresh
    assert third.number == second.number + 1


def test_the_send_deadline_leaves_out_who_has_not_confirmed(epochs, clock):
    membership = epochs.begin_epoch(V1)
    for actor in ("a", "b"):
        epochs.ready(actor, membership.number)
    epochs.acked("a", membership.number)
    assert epochs.expire() == ()
    clock.now += JOIN_S + SEND_S

    assert epochs.expire() == ("b",)
    assert phase_of(epochs) is EpochPhase.BROKEN


def test_answers_of_an_older_epoch_count_for_nothing(epochs):
    deliver(epochs, V1)
    epochs.on_join("c", can_group=True)
    membership = epochs.begin_epoch(V2)

    for actor in ("a", "b", "c"):
        epochs.ready(actor, membership.number - 1)
    assert phase_of(epochs) is EpochPhase.FORMING
    assert epochs.broke(membership.number - 1) == ()
    assert phase_of(epochs) is EpochPhase.FORMING


def test_a_member_that_breaks_every_send_only_pulls_from_then_on(epochs):
    for step in range(MAX_STRIKES):
        membership = epochs.begin_epoch(PolicyVersion(1, step))
        for actor in membership.members:
            epochs.ready(actor, membership.number)
        epochs.acked("a", membership.number)
        epochs.broke(membership.number)

    assert epochs.begin_epoch(V3).members == ("a",)


def test_the_open_epoch_of_an_actor_ends_with_its_ack(epochs):
    membership = epochs.begin_epoch(V1)
    assert epochs.open_epoch_of("a") == membership.number
    assert epochs.open_epoch_of("stranger") == 0

    for actor in ("a", "b"):
        epochs.ready(actor, membership.number)
    epochs.acked("a", membership.number)

    assert epochs.open_epoch_of("a") == 0
    assert epochs.open_epoch_of("b") == membership.number


def test_dead_actors_are_forgotten(epochs, clock):
    clock.now += SILENT_AFTER_S + 0.1
    epochs.on_join("c", can_group=True)

    epochs.forget_silent()

    assert epochs.live() == ("c",)
