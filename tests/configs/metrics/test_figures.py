"""What a role counts for its page."""

from configs.metrics import BusyTime, Histogram


class Clock:
    """Time that a test moves."""

    now = 10.0

    def __call__(self):
        return self.now


def test_an_observation_counts_in_the_first_bucket_that_has_it():
    histogram = Histogram((1.0, 5.0))

    for value in (0.5, 1.0, 3.0, 7.0):
        histogram.observe(value)

    assert histogram.counts == [2, 1, 1]
    assert histogram.total == 11.5


def test_busy_time_is_that_between_the_first_work_and_the_last():
    clock = Clock()
    busy = BusyTime(clock)

    busy.mark(is_busy=True)
    clock.now += 2
    busy.mark(is_busy=True)
    clock.now += 3
    assert busy.seconds == 5

    busy.mark(is_busy=False)
    clock.now += 100
    assert busy.seconds == 5
    busy.mark(is_busy=True)
    clock.now += 1
    assert busy.seconds == 6
