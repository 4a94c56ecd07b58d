"""The supervisor with fake processes: start, restart and order of stopping."""

import shutil
import signal

import pytest

from console.run.supervisor import (
    SAVE_S,
    RestartPolicy,
    StopRequest,
    StopSignals,
    Supervisor,
    cause_of_end,
)


class FakeProcess:
    """A process whose end is decided by the test: the supervisor only polls and signals."""

    def __init__(self, name, events, *, obeys=True):
        self.name = name
        self.role = name.partition("-")[0]
        self.code: int | None = 0  # not started
        self.pid = len(name)
        self.can_start = True
        self._events = events
        self._obeys = obeys

    def start(self):
        self.code = None
        self._events.append(f"start {self.name}")

    def poll(self):
        return self.code

    def ask_to_stop(self):
        if self.code is None:
            self._events.append(f"stop {self.name}")
            if self._obeys:
                self.code = 0

    def kill(self):
        if self.code is None:
            self._events.append(f"kill {self.name}")
            self.code = -9


class Ring:
    """A supervisor of fakes, and a clock that sleeping moves."""

    def __init__(self, *names, stubborn=(), waiting=()):
        self.now = 0.0
        self.events: list[str] = []
        self.logged: list[str] = []
        self.deaths: list[str] = []
        self.finished = False
        self.processes = {
            name: FakeProcess(name, self.events, obeys=name not in stubborn) for name in names
        }
        for name in waiting:
            self.processes[name].can_start = False
        self.supervisor = Supervisor(
            list(self.processes.values()),
            RestartPolicy(2, clock=lambda: self.now, jitter=lambda: 0.0),
            is_finished=lambda: self.finished,
            log=self.logged.append,
            last_error=lambda name: f"{name} complains",
            on_death=lambda process: self.deaths.append(process.name),
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.supervisor.start()

    def sleep(self, seconds):
        self.now += seconds

    def die(self, name, code):
        self.processes[name].code = code


@pytest.fixture
def ring():
    return Ring("redis", "broker", "learner", "actor-0", "actor-1")


def test_a_full_disk_is_the_cause_of_an_end_that_no_log_tells(tmp_path, monkeypatch):
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage(2**30, 2**30, 0))

    assert cause_of_end(None, tmp_path) == (
        "the disk must have room, got 0.00 MiB free of 1,024; free some space on the disk of "
        f"{tmp_path}, and the run, or its next start, goes on"
    )
    assert str(cause_of_end("a thread died", tmp_path)).endswith("(a thread died)")


def test_the_cause_of_an_end_says_what_helps_where_its_own_file_made_the_room(tmp_path):
    error = "died: OSError: [Errno 28] No space left on device"

    assert str(cause_of_end(error, tmp_path)).startswith(f"{error}; free some space on the disk of")
    assert cause_of_end("no key", tmp_path) == "no key"
    assert cause_of_end(None, tmp_path) is None


def test_it_is_over_when_every_process_has_been_left_to_its_end():
    group = Ring("actor-0", "actor-1")
    for name, is_over in (("actor-0", False), ("actor-1", True)):
        group.die(name, 0)
        assert group.supervisor.tick() is None
        assert group.supervisor.is_over is is_over


def test_an_outcome_has_the_code_of_the_process_that_caused_it():
    group = Ring("actor-0", "actor-1")
    group.die("actor-1", 2)

    outcome = group.supervisor.tick()

    assert outcome is not None
    assert (outcome.name, outcome.code, outcome.error) == ("actor-1", 2, "actor-1 complains")


def test_all_processes_start_at_once(ring):
    assert ring.events == [
        "start redis",
        "start broker",
        "start learner",
        "start actor-0",
        "start actor-1",
    ]
    assert ring.supervisor.tick() is None


def test_a_process_that_cannot_begin_at_once_holds_nothing_up():
    ring = Ring("broker", "learner", "actor-0", waiting={"learner"})
    assert ring.events == ["start broker", "start actor-0"]
    assert ring.supervisor.waiting() == ["learner"]
    assert ring.supervisor.tick() is None

    ring.processes["learner"].can_start = True

    assert ring.supervisor.tick() is None
    assert ring.events == ["start broker", "start actor-0", "start learner"]
    assert ring.supervisor.waiting() == []


def test_a_process_that_runs_already_is_not_started_twice(ring):
    ring.supervisor.start()

    assert ring.events.count("start redis") == 1


def test_the_end_of_a_process_is_said_once(ring):
    ring.die("actor-1", -9)
    for _ in range(3):
        ring.supervisor.tick()

    assert ring.deaths == ["actor-1"]


def test_a_dead_process_starts_again_after_its_pause(ring):
    ring.die("actor-1", -9)

    assert ring.supervisor.tick() is None
    assert ring.supervisor.running("actor") == 1
    assert ring.supervisor.waiting() == []
    ring.now += 0.4
    ring.supervisor.tick()
    assert ring.supervisor.running("actor") == 1
    ring.now += 0.2
    ring.supervisor.tick()
    assert ring.supervisor.running("actor") == 2
    assert ring.logged == [
        (
            "actor-1 was killed by signal 9 (out of memory?); "
            "it starts again in 0.5 s: actor-1 complains"
        )
    ]


def test_an_actor_that_drained_is_left_alone_and_told_of_once(ring):
    ring.die("actor-0", 0)

    for _ in range(5):
        assert ring.supervisor.tick() is None
        ring.now += 10

    assert ring.logged == ["actor-0 has drained"]
    assert ring.supervisor.running("actor") == 1


def test_the_run_is_finished_when_the_learner_says_so(ring):
    ring.finished = True
    ring.die("learner", 0)

    outcome = ring.supervisor.tick()

    assert outcome.is_finished


def test_a_settings_error_of_a_process_ends_the_run_with_its_words(ring):
    ring.die("broker", 2)

    outcome = ring.supervisor.tick()

    assert not outcome.is_finished
    assert (outcome.name, outcome.error) == ("broker", "broker complains")
    assert ring.events.count("start broker") == 1


def test_actors_and_the_learner_stop_at_once_and_redis_last(ring):
    ring.events.clear()

    killed = ring.supervisor.stop(timeout_s=5)

    assert killed == []
    assert set(ring.events[:3]) == {"stop actor-0", "stop actor-1", "stop learner"}
    assert ring.events[3:] == ["stop broker", "stop redis"]


def test_what_does_not_stop_in_time_is_killed_before_the_next_role_is_asked():
    ring = Ring("redis", "broker", "learner", "actor-0", stubborn=("actor-0",))
    ring.events.clear()

    killed = ring.supervisor.stop(timeout_s=5)

    assert killed == ["actor-0"]
    assert ring.events[2:] == ["kill actor-0", "stop broker", "stop redis"]
    assert 5 <= ring.now < 6


@pytest.mark.parametrize(("times", "within_s"), [(1, SAVE_S), (2, 0.0)])
def test_who_is_in_haste_ends_all_but_a_learner_that_saves_and_then_that_too(times, within_s):
    ring = Ring("redis", "broker", "learner", "actor-0", stubborn=("learner", "actor-0"))
    ring.events.clear()

    killed = ring.supervisor.stop(timeout_s=30, times_urged=lambda: times)

    assert killed == (["actor-0", "learner"] if times == 1 else ["learner", "actor-0"])
    assert ring.events[-2:] == ["stop broker", "stop redis"]
    assert within_s <= ring.now < within_s + 1


def test_the_first_request_interrupts_and_only_another_ctrl_c_is_in_haste():
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            try:
                signal.raise_signal(number)
            except StopRequest:
                assert number == signal.SIGTERM
        assert signals.times_urged == 1


def test_what_a_process_ignores_does_not_stop_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
