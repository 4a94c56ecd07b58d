"""Publications run beside the main thread, one at a time, and what ends one reaches it."""

import contextlib
import contextvars
import sys
import threading
import time

import pytest
import torch

from configs.errors import DeadlineError, LostLineage
from learner.weights import background_publish as module
from learner.weights.background_publish import Handover

CPU = torch.device("cpu")


@pytest.fixture
def handover():
    handover = Handover(CPU)
    yield handover
    handover.close()


def test_the_main_thread_goes_on_until_it_waits(handover):
    may_end, ended = threading.Event(), []

    handover.begin(lambda free: ended.append(may_end.wait(10.0)))
    assert not ended
    threading.Timer(0.1, may_end.set).start()
    waited_s = handover.wait()

    assert ended == [True]
    assert waited_s > 0.05
    assert handover.wait() < 0.01  # nothing is on its way any more


def test_what_ends_a_publication_is_raised_by_the_wait_and_the_next_can_begin(handover):
    def lose(free):
        raise LostLineage("a newer learner")

    handover.begin(lose)
    with pytest.raises(LostLineage, match="a newer learner"):
        handover.wait()

    handover.begin(lambda free: None)
    assert handover.wait() >= 0.0


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_publication_is_given_the_interpreter_sooner_while_it_has_the_model(handover, ends_well):
    usual_s, meanwhile_s, afterwards_s = sys.getswitchinterval(), [], []

    def publish(free):
        meanwhile_s.append(sys.getswitchinterval())
        free()
        afterwards_s.append(sys.getswitchinterval())
        if not ends_well:
            raise LostLineage("a newer learner")

    handover.begin(publish)
    with contextlib.nullcontext() if ends_well else pytest.raises(LostLineage):
        handover.settle()

    assert meanwhile_s[0] < usual_s / 5
    assert afterwards_s == pytest.approx([usual_s])
    assert sys.getswitchinterval() == pytest.approx(usual_s)


def test_a_timeout_inside_a_publication_is_not_taken_for_a_hang(handover):
    def time_out(free):
        raise TimeoutError("Redis")

    handover.begin(time_out)
    with pytest.raises(TimeoutError, match="Redis"):
        handover.wait()


def test_a_publication_that_hangs_is_given_up(handover, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    may_end = threading.Event()

    handover.begin(lambda free: may_end.wait(10.0))
    with pytest.raises(DeadlineError, match="handed over within"):
        handover.wait()
    began = time.monotonic()
    handover.close()
    assert time.monotonic() - began < 0.04, "it is not waited for again"
    may_end.set()


def test_the_model_is_free_before_its_weights_can_be_had(handover):
    may_end, ended = threading.Event(), []

    def publish(free):
        free()
        ended.append(may_end.wait(10.0))

    handover.begin(publish)
    handover.wait()
    assert not ended  # the next step may begin
    may_end.set()
    handover.settle()

    assert ended == [True]


def test_one_publication_at_a_time(handover):
    order = []

    def first(free):
        free()
        time.sleep(0.1)
        order.append("first")

    handover.begin(first)
    handover.begin(lambda free: order.append("second"))
    waited_s = handover.wait()
    handover.settle()

    assert order == ["first", "second"]
    assert waited_s > 0.05, "what the second had to wait for the first counts"


@pytest.mark.parametrize("meet", ["begin", "settle"])
def test_what_ends_a_publication_after_the_model_is_free_is_met_later(handover, meet):
    def lose(free):
        free()
        time.sleep(0.05)
        raise LostLineage("a newer learner")

    handover.begin(lose)
    handover.wait()

    with pytest.raises(LostLineage):
        handover.settle() if meet == "settle" else handover.begin(lambda free: None)


def test_its_log_lines_carry_the_words_of_who_began(handover):
    word, seen = contextvars.ContextVar("word", default="none"), []
    word.set("ours")

    handover.begin(lambda free: seen.append(word.get()))
    handover.wait()

    assert seen == ["ours"]


def test_closing_lets_what_has_begun_end():
    handover, ended = Handover(CPU), []

    def publish(free):
        time.sleep(0.1)
        ended.append(True)

    handover.begin(publish)
    handover.close()

    assert ended == [True]
