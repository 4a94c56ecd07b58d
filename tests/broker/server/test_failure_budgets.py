"""Failures of keys and holders beside those of others: who is suspended, and for how long."""

from __future__ import annotations

from broker.server.flow_control import FORGET_S, MOST_FAILURES, FailureBudgets
from tests.broker.support.fake_clock import FakeClock


def test_a_holder_is_judged_without_the_key_that_fails_most() -> None:
    budgets = FailureBudgets(FakeClock())
    budgets.count("other", good=100)
    budgets.count("third", good=100)
    budgets.count("fleet~a", bad=1000)
    budgets.count("fleet~b", bad=MOST_FAILURES - 1)
    assert budgets.excess("fleet") is None
    assert budgets.excess("fleet~a") is not None
    budgets.count("fleet~c", bad=1)
    text = "20 of its last 20 leases failed, but 0 of 100 elsewhere"
    assert budgets.excess("fleet") == (text, True)
    budgets.count("fleet~d", good=21)
    assert budgets.excess("fleet") is None, "less than half"

    budgets.forget("fleet~a")
    budgets.count("fleet~e", bad=60)
    budgets.forget("fleet")
    budgets.count("fleet~a", bad=MOST_FAILURES)
    budgets.count("fleet~b", bad=MOST_FAILURES)
    assert budgets.excess("fleet") == (text, True), "what was before is forgotten"


def test_failures_are_judged_beside_those_of_other_keys() -> None:
    clock = FakeClock()
    budgets = FailureBudgets(clock)
    budgets.count("a", bad=19)
    assert budgets.excess("a") is None, "too few to judge"
    budgets.count("a", bad=1)
    text = "20 of its last 20 leases failed, but 0 of 0 elsewhere"
    assert budgets.excess("a") == (text, False), "others have nothing to judge it by"
    budgets.count("b", good=MOST_FAILURES)
    assert budgets.excess("a") == (text.replace("0 of 0", "0 of 20"), False), "one may lie"
    budgets.count("c", good=MOST_FAILURES)
    assert budgets.excess("a") == (text.replace("0 of 0", "0 of 20"), True)
    budgets.forget("b")
    budgets.forget("c")

    budgets.count("b", good=60, bad=40)
    assert budgets.excess("a") is None, "a share of 1.0 is not three times 0.4"
    budgets.count("b", good=40)
    assert budgets.excess("a") is not None
    budgets.count("a", good=21)
    assert budgets.excess("a") is None, "less than half"

    clock.now += FORGET_S
    budgets.count("a")
    budgets.count("a", bad=9)
    assert budgets.excess("a") is None, "half is forgotten"
    budgets.count("b", good=200)
    assert budgets.excess("a") is None, "19 since then are too few"
    budgets.count("a", bad=1)
    assert budgets.excess("a") is not None
    budgets.forget("a")
    assert budgets.excess("a") is None


def test_made_up_successes_make_nobody_else_look_bad() -> None:
    """Rows of this run fail half of the time; one of four holders says that its never do."""
    budgets = FailureBudgets(FakeClock())
    budgets.count("liar", good=100_000)
    for name in "abc":
        budgets.count(name, good=40, bad=60)

    assert [budgets.excess(name) for name in "abc"] == [None] * 3
    budgets.count("broken", bad=MOST_FAILURES)
    assert budgets.excess("broken") is None, "a share of 1.0 is not three times 0.6"


def test_beside_one_liar_a_suspension_is_brief() -> None:
    budgets = FailureBudgets(FakeClock())
    budgets.count("liar~1", good=100_000)
    budgets.count("liar~2", good=100_000)
    budgets.count("honest", good=20, bad=30)

    excess = budgets.excess("honest")

    assert excess is not None
    assert not excess.is_certain, "two keys of one holder are one"
