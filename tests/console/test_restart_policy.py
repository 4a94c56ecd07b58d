"""The action that follows each end of a process."""

import pytest

from console.run.supervisor import Action, RestartPolicy


class FakeClock:
    """Time that passes when told to: the policy only reads it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def policy(clock):
    return RestartPolicy(3, clock=clock, jitter=lambda: 0.0)


@pytest.mark.parametrize(
    ("role", "code", "is_finished", "action"),
    [
        ("learner", 0, True, Action.FINISH),
        ("learner", 0, False, Action.FAIL),
        ("learner", 1, False, Action.RESTART),
        ("learner", -9, True, Action.RESTART),
        ("learner", 3, False, Action.FAIL),
        ("actor", 0, False, Action.LEAVE),
        ("actor", -9, False, Action.RESTART),
        ("actor", 2, False, Action.FAIL),
        ("actor", 4, False, Action.RESTART),
        ("agents", 0, False, Action.LEAVE),
        ("agents", -9, False, Action.RESTART),
        ("agents", 2, False, Action.FAIL),
        ("broker", 0, False, Action.RESTART),
        ("broker", 2, False, Action.FAIL),
        ("redis", 0, False, Action.RESTART),
        ("redis", -11, False, Action.RESTART),
    ],
)
def test_what_follows_from_an_exit_code(policy, role, code, is_finished, action):
    assert policy.decide(f"{role}-0", role, code, is_finished=is_finished).action is action


def test_an_actor_that_was_told_to_go_has_drained_by_the_code_of_the_settings():
    policy = RestartPolicy(3, exit_when_told=75)

    def action(role, code):
        return policy.decide("a", role, code, is_finished=False).action

    assert action("actor", 75) is action("actor", 0) is Action.LEAVE
    assert action("broker", 75) is Action.RESTART


def test_pauses_between_restarts_double(policy):
    delays = [policy.decide("actor-0", "actor", 1, is_finished=False).delay_s for _ in range(3)]

    assert delays == [0.5, 1.0, 2.0]


def test_the_pause_is_bounded_and_jittered(clock):
    policy = RestartPolicy(100, clock=clock, jitter=lambda: 1.0)

    delays = [policy.decide("actor-0", "actor", 1, is_finished=False).delay_s for _ in range(50)]

    assert delays[0] == 0.6
    assert max(delays) == 36.0


def test_too_many_restarts_of_one_process_end_the_run(policy):
    for _ in range(3):
        policy.decide("actor-0", "actor", -9, is_finished=False)

    other = policy.decide("actor-1", "actor", -9, is_finished=False)
    last = policy.decide("actor-0", "actor", -9, is_finished=False)

    assert other.action is Action.RESTART
    assert last.action is Action.FAIL
    killed = "actor-0 was killed by signal 9 (out of memory?)"
    assert last.reason == f"{killed} again after 3 restarts within 10 minutes"


def test_restarts_of_long_ago_do_not_count(policy, clock):
    for _ in range(20):
        decision = policy.decide("actor-0", "actor", 1, is_finished=False)
        clock.now += 300

        assert decision.action is Action.RESTART
        assert decision.delay_s <= 1.0


def test_an_engine_that_could_not_start_gets_one_more_try(policy):
    first, second = (policy.decide("actor-0", "actor", 5, is_finished=False) for _ in range(2))

    assert first.action is Action.RESTART
    assert second.action is Action.FAIL
    assert second.reason == "actor-0 could not start its engine twice"


def test_a_start_that_failed_long_before_another_does_not_count(policy):
    for code in (5, 4, 5):
        assert policy.decide("actor-0", "actor", code, is_finished=False).action is Action.RESTART
    assert policy.decide("actor-1", "actor", 5, is_finished=False).action is Action.RESTART
