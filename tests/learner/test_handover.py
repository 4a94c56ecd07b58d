"""Publications run beside the main thread, one at a time, and what ends one reaches it."""

import contextlib
import contextvars
import sys
import threading
import time

import pytest
import torch

from configs.errors import DeadlineError, LostLineage
from learner import handover as module
from learner.handover import Handover

CPU = torch.device("cpu")


@pytest.fixture
def handover():
    handover = Handover(CPU)
    yield handover
    handover.close()


def test_the_main_thread_goes_on_until_it_waits(handover):
    may_end, ended = threading.Event(), []

    handover.begin(lambda: ended.append(may_end.wait(10.0)))
    assert not ended
    threading.Timer(0.1, may_end.set).start()
    waited_s = handover.wait()

    assert ended == [True]
    assert waited_s > 0.05
    assert handover.wait() == 0.0  # nothing is on its way any more


def test_what_ends_a_publication_is_raised_by_the_wait_and_the_next_can_begin(handover):
    def lose():
        raise LostLineage("a newer learner")

    handover.begin(lose)
    with pytest.raises(LostLineage, match="a newer learner"):
        handover.wait()

    handover.begin(lambda: None)
    assert handover.wait() >= 0.0


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_publication_is_given_the_interpreter_sooner_for_as_long_as_it_lasts(handover, ends_well):
    usual_s, meanwhile_s = sys.getswitchinterval(), []

    def publish():
        meanwhile_s.append(sys.getswitchinterval())
        if not ends_well:
            raise LostLineage("a newer learner")

    handover.begin(publish)
    with contextlib.nullcontext() if ends_well else pytest.raises(LostLineage):
        handover.wait()

    assert meanwhile_s[0] < usual_s / 5
    assert sys.getswitchinterval() == pytest.approx(usual_s)


def test_a_timeout_inside_a_publication_is_not_taken_for_a_hang(handover):
    def time_out():
        raise TimeoutError("Redis")

    handover.begin(time_out)
    with pytest.raises(TimeoutError, match="Redis"):
        handover.wait()


def test_a_publication_that_hangs_is_given_up(handover, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    may_end = threading.Event()

    handover.begin(lambda: may_end.wait(10.0))
    with pytest.raises(DeadlineError, match="handed over within"):
        handover.wait()
    may_end.set()


def test_the_model_is_handed_over_once_at_a_time(handover):
    handover.begin(lambda: time.sleep(0.01))

    with pytest.raises(AssertionError, match="waited for"):
        handover.begin(lambda: None)


def test_its_log_lines_carry_the_words_of_who_began(handover):
    word, seen = contextvars.ContextVar("word", default="none"), []
    word.set("ours")

    handover.begin(lambda: seen.append(word.get()))
    handover.wait()

    assert seen == ["ours"]


def test_closing_lets_what_has_begun_end():
    handover, ended = Handover(CPU), []

    def publish():
        time.sleep(0.1)
        ended.append(True)

    handover.begin(publish)
    handover.close()

    assert ended == [True]
