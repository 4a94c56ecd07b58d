"""Which members a broken NCCL broadcast is charged to, and when NCCL is used again."""

from __future__ import annotations

import pytest

from buffer.record.episode import PolicyVersion
from learner.weights.epochs import Membership, WeightEpochs
from learner.weights.nccl_strikes import AGAIN_AFTER, HEARD_WITHIN_S, LONGEST_PAUSE, NCCL_STRIKES


class Story:
    """Actors with GPUs, of which some break broadcasts, or die; the clock moves by versions."""

    def __init__(self, *actors: str) -> None:
        self.now = 100.0
        self.step = 0
        self.living = list(actors)
        self.late: set[str] = set()
        """Those that are silent until the next version."""
        self.epochs = WeightEpochs(join_s=10.0, send_s=30.0, clock=lambda: self.now)
        self.epochs.may_nccl = True
        self.join()

    def join(self) -> None:
        for actor in self.living:
            if actor not in self.late:
                version = PolicyVersion(1, self.step)
                self.epochs.on_join(actor, can_group=True, device="cuda", version=version)

    def version(self, *, broken_for: tuple[str, ...] = ()) -> Membership:
        """One version: all but these confirm it, and HEARD_WITHIN_S pass."""
        self.step += 1
        membership = self.epochs.begin_epoch(PolicyVersion(1, self.step))
        assert membership is not None
        for actor in membership.members:
            self.epochs.ready(actor, membership.number)
        for actor in membership.members:
            if actor not in broken_for:
                self.epochs.acked(actor, membership.number)
        self.epochs.broke(membership.number)
        self.now += HEARD_WITHIN_S
        self.join()
        self.epochs.forget_silent()
        return membership

    def backends(self, count: int) -> list[str]:
        return [self.version().backend for _ in range(count)]


ALL = ("a", "b", "c")


def test_a_member_that_dies_is_charged_to_nobody_else() -> None:
    story = Story(*ALL)
    for _ in range(NCCL_STRIKES + 1):  # of others each time: they die, and others come
        story.living.remove("c")
        assert story.version(broken_for=ALL).backend == "nccl"
        story.now += 10.0  # it is silent for good
        story.join()
        following = story.version()
        assert (following.backend, following.members) == ("nccl", ("a", "b"))
        story.living.append("c")
        story.join()


def test_once_is_no_matter_and_a_confirmed_version_wipes_it_out() -> None:
    story = Story(*ALL)
    for _ in range(4):
        assert story.version(broken_for=ALL).backend == "nccl"
        assert story.version().members == ALL


def test_one_that_stands_still_in_every_broadcast_pulls_and_the_others_keep_nccl() -> None:
    story = Story(*ALL)
    for _ in range(NCCL_STRIKES):
        story.late = {"b"}
        assert story.version(broken_for=ALL).members == ALL
        story.epochs._nccl.clean(ALL)  # the verdict comes before it is back
        story.late = set()
        story.join()

    kept = story.version()

    assert (kept.backend, kept.members) == ("nccl", ("a", "c"))


def test_where_nobody_can_be_told_apart_all_go_over_gloo_and_nccl_comes_back() -> None:
    story = Story(*ALL)
    for _ in range(NCCL_STRIKES):
        assert story.version(broken_for=ALL).backend == "nccl"

    assert story.backends(AGAIN_AFTER + 2) == ["gloo"] * AGAIN_AFTER + ["nccl"] * 2


def test_a_trial_that_fails_doubles_the_pause_up_to_a_bound() -> None:
    story = Story("a", "b")
    pauses = []
    for _ in range(NCCL_STRIKES - 1):
        story.version(broken_for=ALL)
    for _ in range(8):
        assert story.version(broken_for=ALL).backend == "nccl"
        pause = 0
        while story.epochs._nccl.clean(("a", "b")) == ():
            assert story.version().backend == "gloo"
            pause += 1
        pauses.append(pause)

    assert pauses[:4] == [AGAIN_AFTER, 2 * AGAIN_AFTER, 4 * AGAIN_AFTER, 8 * AGAIN_AFTER]
    assert max(pauses) == LONGEST_PAUSE


def test_a_new_membership_without_the_struck_one_begins_with_nccl() -> None:
    story = Story("a")
    for _ in range(NCCL_STRIKES):
        story.version(broken_for=ALL)
    assert story.version().backend == "gloo"

    story.living.append("b")
    story.join()
    assert story.version().members == ("b",)  # a pulls meanwhile
    story.living.remove("a")
    story.now += 10.0
    story.join()

    assert (story.version().backend, story.version().fresh) == ("nccl", False)


def test_breaking_over_nccl_is_no_reason_to_leave_groups() -> None:
    story = Story("a", "b")
    for _ in range(NCCL_STRIKES):
        story.version(broken_for=ALL)
    assert story.version(broken_for=("a",)).backend == "gloo"  # one strike of three there

    assert story.version().members == ("a", "b")


@pytest.mark.parametrize(("may_nccl", "device"), [(False, "cuda"), (True, "cpu")])
def test_without_nccl_here_or_a_gpu_there_groups_are_of_gloo(may_nccl: bool, device: str) -> None:
    story = Story("a")
    story.epochs.may_nccl = may_nccl
    story.epochs.on_join("b", can_group=True, device=device)

    assert story.version().backend == "gloo"


def test_a_change_of_backend_is_a_new_group() -> None:
    story = Story("a", "b")
    first = story.version()
    story.epochs.may_nccl = False

    second = story.version()

    assert (first.members, first.backend) == (second.members, "nccl")
    assert (second.backend, second.fresh) == ("gloo", True)
