"""Publishing runs beside the main thread, one version at a time, and its errors reach it."""

import contextvars
import threading
import time

import pytest
import torch

from configs.errors import DeadlineError, LostLineage
from learner.weights import background_publish as module
from learner.weights.background_publish import BackgroundPublisher

CPU = torch.device("cpu")


@pytest.fixture
def publisher():
    publisher = BackgroundPublisher(CPU)
    yield publisher
    publisher.close()


def test_the_main_thread_goes_on_until_it_waits(publisher):
    may_end, ended = threading.Event(), []

    publisher.start(lambda free: ended.append(may_end.wait(10.0)))
    assert not ended
    threading.Timer(0.1, may_end.set).start()
    publisher.wait()

    assert ended == [True]
    publisher.wait()  # nothing is under way any more


def test_what_ends_a_publish_is_raised_by_the_wait_and_the_next_can_begin(publisher):
    def lose(free):
        raise LostLineage("a newer learner")

    publisher.start(lose)
    with pytest.raises(LostLineage, match="a newer learner"):
        publisher.wait()

    publisher.start(lambda free: None)
    publisher.wait()


def test_a_timeout_inside_a_publish_is_not_taken_for_a_hang(publisher):
    def time_out(free):
        raise TimeoutError("Redis")

    publisher.start(time_out)
    with pytest.raises(TimeoutError, match="Redis"):
        publisher.wait()


def test_a_publish_that_hangs_is_given_up(publisher, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    may_end = threading.Event()

    publisher.start(lambda free: may_end.wait(10.0))
    with pytest.raises(DeadlineError, match="handed over within"):
        publisher.wait()
    monkeypatch.setattr(module, "DEADLINE_S", 5.0)
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 2.0, "it is not waited for again"
    may_end.set()


def test_the_model_is_free_before_its_weights_can_be_had(publisher):
    may_end, ended = threading.Event(), []

    def publish(free):
        free()
        ended.append(may_end.wait(10.0))

    publisher.start(publish)
    publisher.wait()
    assert not ended  # the next step may begin
    may_end.set()
    publisher.join()

    assert ended == [True]


def test_one_publish_at_a_time(publisher):
    order = []

    def first(free):
        free()
        time.sleep(0.1)
        order.append("first")

    publisher.start(first)
    publisher.start(lambda free: order.append("second"))
    publisher.join()

    assert order == ["first", "second"]


@pytest.mark.parametrize("meet", ["start", "join"])
def test_what_ends_a_publish_after_the_model_is_free_is_met_later(publisher, meet):
    may_end = threading.Event()

    def lose(free):
        free()
        may_end.wait(10.0)
        raise LostLineage("a newer learner")

    publisher.start(lose)
    publisher.wait()
    may_end.set()

    with pytest.raises(LostLineage):
        publisher.join() if meet == "join" else publisher.start(lambda free: None)


def test_its_log_lines_carry_the_fields_of_the_thread_that_started_it(publisher):
    word, seen = contextvars.ContextVar("word", default="none"), []
    word.set("ours")

    publisher.start(lambda free: seen.append(word.get()))
    publisher.wait()

    assert seen == ["ours"]


def test_closing_waits_for_a_publish_under_way():
    publisher, ended = BackgroundPublisher(CPU), []

    def publish(free):
        time.sleep(0.1)
        ended.append(True)

    publisher.start(publish)
    publisher.close()

    assert ended == [True]
