"""Progress and its display, from lines of metrics."""

import io
import json
import re
import tracemalloc
from dataclasses import replace

import pytest
from rich.console import Console

from buffer.operations.values import ActorSeen
from configs.json_lines import JsonLinesFollower
from console.display.display import IdleTime, LiveDisplay, PlainDisplay, make_display
from console.display.progress import Progress, RunProgress, Stages, summarise
from console.display.snapshot import GroupsInFlight, View, duration, figures
from console.report.curve_charts import smooth
from console.run.run_folder import RunFolder
from learner.data.grades import HeldOut


def scored(score):
    return HeldOut("accuracy", score, None)


def row(step, **fields):
    return {
        "step": step,
        "wall_s": 2.0 * step,
        "reward_mean": 0.5,
        "completion_tokens": 300,
        "trained_tokens": 200,
        "policy_lag_mean": 1.5,
        "wait_s": 0.5,
    } | fields


def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_nothing_is_known_before_the_first_batch():
    assert summarise([], {}, steps=9) == Progress(0, 9)
    assert summarise([], {0: scored(0.25)}, steps=9).held_out == scored(0.25)


def test_figures_of_the_recent_batches():
    progress = summarise([row(k) for k in range(1, 6)], {0: scored(0.1), 5: scored(0.7)}, steps=25)

    assert progress.step == 5
    assert progress.reward == pytest.approx(0.5)
    assert (progress.held_out_before, progress.held_out) == (scored(0.1), scored(0.7))
    assert progress.tokens_per_s == pytest.approx(150)
    assert progress.trained_tokens_per_s == pytest.approx(100)
    assert progress.idle_fraction == pytest.approx(0.25)
    assert progress.eta_s == pytest.approx(40)
    assert progress.policy_lag == 1.5


def test_one_batch_has_no_speed_yet():
    progress = summarise([row(1)], {}, steps=25)

    assert progress.reward == 0.5
    assert (progress.tokens_per_s, progress.eta_s, progress.idle_fraction) == (None, None, None)


def test_the_newest_alerts_of_the_recent_batches_are_shown():
    rows = [row(k) for k in range(1, 41)]
    rows[24]["alerts"] = ["kl"]
    rows[29]["alerts"] = ["skipped", "rollback"]
    rows[39]["alerts"] = []

    assert summarise(rows, {}, steps=99).alerts == "skipped, rollback at batch 30"
    assert summarise(rows[:9], {}, steps=99).alerts is None


def test_a_figure_that_is_null_counts_as_zero():
    assert summarise([row(1, reward_mean=None)], {}, steps=2).reward == 0.0


def test_half_written_lines_wait_for_their_end(tmp_path):
    path = tmp_path / "x.jsonl"
    follower = JsonLinesFollower(path)
    assert follower.read_new() == []

    path.write_text('{"a": 1}\nnot json\n{"b"')
    assert follower.read_new() == [{"a": 1}]
    with path.open("a") as file:
        file.write(': 2}\n{"broken\n')
    assert follower.read_new() == [{"b": 2}]
    assert follower.read_new() == []


def test_a_learner_that_comes_back_takes_its_progress_back(tmp_path):
    folder = RunFolder(tmp_path)
    progress = RunProgress(folder, steps=10)
    write(folder.metrics, row(1), row(2), row(3))
    write(folder.evaluations, {"step": 0, "accuracy": 0.1}, {"step": 3, "accuracy": 0.9})
    assert (progress.read_progress().step, progress.read_progress().held_out) == (3, scored(0.9))

    write(tmp_path / "new", row(1))
    (tmp_path / "new").replace(folder.metrics)
    write(tmp_path / "new", {"step": 0, "accuracy": 0.1})
    (tmp_path / "new").replace(folder.evaluations)

    assert (progress.read_progress().step, progress.read_progress().held_out) == (1, scored(0.1))


def test_the_newest_accuracy_of_each_environment_is_shown_where_there_are_several(tmp_path):
    folder = RunFolder(tmp_path)
    progress = RunProgress(folder, steps=10)
    one = {"step": 0, "accuracy": 0.1, "environments": {"sums": {"accuracy": 0.1}}}
    write(folder.evaluations, one)
    assert progress.read_progress().scores == {}

    both = {"sums": {"accuracy": 0.5}, "words": {"accuracy": 0.25}, "late": {"episodes": 0}}
    write(folder.evaluations, one, {"step": 3, "accuracy": 0.4, "environments": both})

    shown = figures(View(progress.read_progress(), {}, 1))
    assert list(shown.items())[1:4] == [
        ("accuracy", "0.400"),
        ("of sums", "0.500"),
        ("of words", "0.250"),
    ]


def test_a_long_run_takes_no_more_memory_than_its_last_batches(tmp_path):
    folder = RunFolder(tmp_path)
    progress = RunProgress(folder, steps=100_000)
    tracemalloc.start()
    taken = []
    for first in range(1, 5000, 500):
        with folder.metrics.open("a") as file:
            file.writelines(json.dumps(row(step)) + "\n" for step in range(first, first + 500))
        shown = progress.read_progress()
        taken.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert (shown.step, shown.reward, shown.tokens_per_s) == (5000, 0.5, 150.0)
    assert taken[-1] < taken[0] + 100_000, taken


def test_stages_and_errors_are_read_from_this_life_only(tmp_path):
    log = tmp_path / "actor-0.log"
    log.write_text('{"stage": "of yesterday", "level": "error", "event": "old"}\n')
    stages = Stages({"actor-0": log})
    assert stages.read_stages() == {"actor-0": "starting"}

    with log.open("a") as file:
        file.write('{"stage": "importing vLLM"}\nbanner\n{"level": "error", "event": "no room"}\n')

    assert stages.read_stages() == {"actor-0": "importing vLLM"}
    assert stages.take_error("actor-0") == "no room"
    assert stages.take_error("actor-0") is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ({"event": "a thread ended", "reason": "no key"}, "a thread ended: no key"),
        (
            {"event": "died", "exception": 'Traceback\n  File "x"\nOSError: [Errno 28] No space\n'},
            "died: OSError: [Errno 28] No space",
        ),
        (
            {"event": "died", "exception": "  + Group\n  | OSError: full\n  +---------------\n"},
            "died: OSError: full",
        ),
        ({"event": "died"}, "died"),
    ],
)
def test_an_error_is_told_with_its_cause(tmp_path, line, cause):
    log = tmp_path / "learner.log"
    stages = Stages({"learner": log})

    write(log, {"level": "error", **line})

    assert stages.take_error("learner") == cause


def test_the_first_batch_reports_the_seconds_of_each_stage_once(tmp_path):
    log, now = tmp_path / "learner.log", [1000.0]
    logs = {name: tmp_path / f"{name}.log" for name in ("learner", "broker", "actor-0")}
    stages = Stages(logs, clock=lambda: now[0])
    lines = [
        {"stage": "importing torch", "timestamp": "1970-01-01T00:16:40.500000Z"},
        {"stage": "waiting for episodes", "timestamp": "1970-01-01T00:16:43.600000Z"},
    ]
    write(log, *lines)
    write(logs["broker"], {"stage": "listening", "timestamp": "1970-01-01T00:16:41.400000Z"})

    stages.read_stages()
    now[0] = 1009.0

    assert stages.report() == [
        "first batch after 9.0 s",
        "learner: starting 0.5 s, importing torch 3.1 s, waiting for episodes 5.4 s",
        "broker: starting 1.4 s, listening",
        "actor-0: starting 9.0 s",
    ]
    assert stages.report() == []
    with log.open("a") as file:
        file.write('{"stage": "importing torch"}\n')
    assert stages.read_stages()["learner"] == "importing torch"


def view(step, **fields):
    return View(Progress(step, 10, **fields), {"learner": "importing torch"}, 2, step > 0)


def test_plain_lines_tell_each_stage_once_and_figures_now_and_then():
    now, out = [0.0], io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), name="demo", clock=lambda: now[0])

    with display:
        for _ in range(3):
            display.show(view(0))
        for step in range(1, 11):
            now[0] += 1
            display.show(view(step, reward=0.25, held_out=scored(0.5), eta_s=65))
        display.show(view(10))

    lines = out.getvalue().splitlines()
    assert lines[0] == "learner: importing torch"
    assert [line.split(",")[0] for line in lines[1:]] == [
        "demo: batch 1/10",
        "demo: batch 6/10",
        "demo: batch 10/10",
    ]
    assert lines[1].endswith(
        "reward 0.250, accuracy 0.500, tokens/s -, policy lag -, learner idle -, actors 2, "
        "left 1:05 min"
    )


def sampling(tokens, *, waiting=0, **fields):
    sent = {"tokens": str(tokens), "in_flight": "5.0", "finished": "3", **fields}
    return View(
        Progress(0, 10),
        {"actor-0": "sampling"},
        1,
        is_training=False,
        actors=(ActorSeen("a", 1.0, sent), ActorSeen("gone", 99.0, {"tokens": "1e9"})),
        silent_after_s=5.0,
        fill=GroupsInFlight(
            sampling=2, waiting=waiting, claimed=1, admitted=12, memory=0.0, batch=4
        ),
    )


def test_plain_lines_say_what_is_sampled_until_the_first_batch():
    now, out = [0.0], io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), name="demo", clock=lambda: now[0])

    for tokens in (0, 0.0, "1024.0", 1100, 2048, 2048, 4096):
        display.show(sampling(tokens, waiting=int(float(tokens)) // 1024))
        now[0] += 8
    display.show(view(1))

    behind = "3 episodes finished, 5 in flight"
    assert out.getvalue().splitlines()[:-1] == [
        "actor-0: sampling",
        f"demo: batch 1, 2 of 4 groups complete, 1,024 tokens sampled, {behind}",
        f"demo: batch 1, 3 of 4 groups complete, 2,048 tokens sampled, {behind}",
        f"demo: batch 1, 4 of 4 groups complete, 4,096 tokens sampled, {behind}",
    ]
    assert "batch 1/10" in out.getvalue().splitlines()[-1]


def test_advice_is_that_of_the_newest_batch():
    rows = [row(1, advice=[{"rule": "a", "text": "do it"}]), row(2, advice=[])]

    assert summarise(rows[:1], {}, steps=9).advice == {"a": "do it"}
    assert summarise(rows, {}, steps=9).advice == {}


def test_advice_is_one_line_when_it_begins():
    out = io.StringIO()
    clock = iter(range(0, 1000, 10))
    display = PlainDisplay(Console(file=out), name="demo", clock=lambda: next(clock))

    for step, text in enumerate(["", "do it, 70%", "do it, 80%", "", "do it, 90%"], start=1):
        display.show(view(step, advice={"a": text} if text else {}))

    advice = [line for line in out.getvalue().splitlines() if "ADVICE" in line]
    assert advice == ["demo: ADVICE do it, 70%", "demo: ADVICE do it, 90%"]


def test_alerts_are_one_line_each_time_they_change():
    now, out = [0.0], io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), name="demo", clock=lambda: now[0])

    with display:
        for step, alert in enumerate((None, "ess at batch 2", "ess at batch 2", None), start=1):
            now[0] += 10
            display.show(view(step, alerts=alert))

    alerts = [line for line in out.getvalue().splitlines() if "ALERT" in line]
    assert alerts == ["demo: ALERT ess at batch 2; the learner's log says why"]
    live = io.StringIO()
    with LiveDisplay(Console(file=live, force_terminal=True, width=120), name="demo") as in_place:
        in_place.show(view(4, alerts="kl at batch 4"))
    assert re.search("ALERT.*kl at batch 4", live.getvalue())


def test_a_terminal_gets_the_live_display_unless_plain_lines_are_asked_for():
    terminal = Console(file=io.StringIO(), force_terminal=True)

    assert isinstance(make_display(terminal, name="x", plain=False), LiveDisplay)
    assert isinstance(make_display(terminal, name="x", plain=True), PlainDisplay)
    assert isinstance(
        make_display(Console(file=io.StringIO()), name="x", plain=False), PlainDisplay
    )


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (0, ["learner", "importing torch"]),
        (4, ["demo", "batch 4 of 10", "1:01 min left", "0.250"]),
    ],
)
def test_the_live_display_shows_stages_then_figures(step, shown):
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=120), name="demo")

    with display:
        display.show(view(step, reward=0.25, eta_s=61))
        display.log("actor-0 starts again")

    for text in (*shown, "actor-0 starts again"):
        assert text in out.getvalue()


def test_spans_of_time_read_well():
    assert [duration(s) for s in (0.4, 59.4, 185, 7800)] == ["0 s", "59 s", "3:05 min", "2:10 h"]
    assert figures(view(1))["left"] == "-"


def test_smoothing_keeps_a_constant_and_follows_a_step():
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert 0.5 < smooth([0.0] * 20 + [1.0] * 10)[-1] < 1.0


def test_an_alarm_is_printed_once_when_it_begins_and_once_when_it_ends():
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), name="demo")
    for alarm in (None, "no actor", "no actor", None, None):
        display.show(View(Progress(0, 9), {}, 0, is_training=False, alarm=alarm))

    assert out.getvalue().splitlines() == [
        "demo: ALARM no actor",
        "demo: ALARM has ended: there are new episodes",
    ]


@pytest.mark.parametrize("step", [0, 3])
def test_what_closes_leasing_is_printed_once_while_its_figures_change(step):
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), name="demo")
    for closed in (
        (),
        ("key a for 30 s",),
        ("key a for 29 s", "all: it died"),
        (),
        ("all: it died",),
    ):
        display.show(replace(view(step), closed=closed))

    assert [line for line in out.getvalue().splitlines() if "CLOSED" in line] == [
        "demo: CLOSED key a for 30 s",
        "demo: CLOSED all: it died",
        "demo: CLOSED all: it died",
    ]


def test_a_reason_is_an_alarm_once_it_has_lasted_without_a_batch():
    now = [0.0]
    idle = IdleTime(60.0, lambda: now[0])

    def after(seconds, reason="no actor", step=3):
        now[0] += seconds
        return idle.alarm(reason, step)

    assert after(0.0) is None
    assert after(59.0) is None
    assert after(2.0) == "no actor"
    assert after(1.0, step=4) is None
    assert after(59.0, step=4) is None
    assert after(1.0, step=4) == "no actor"
    assert after(1.0, None, 4) is None
    assert after(90.0, step=4) is None


def test_the_live_display_draws_once_a_second_and_at_its_end():
    now, out = [0.0], io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)

    with LiveDisplay(console, name="demo", clock=lambda: now[0]) as display:
        for step in range(1, 4):
            display.show(view(step))
            now[0] += 0.4
        assert "batch 2 of 10" not in out.getvalue()
        display.show(view(4))
        assert "batch 4 of 10" in out.getvalue()
        display.show(view(5))
    assert "batch 5 of 10" in out.getvalue()


def test_plain_lines_say_why_other_actors_are_wanted_once():
    now, out = [0.0], io.StringIO()
    display = PlainDisplay(Console(file=out, width=200), name="demo", clock=lambda: now[0])

    for step, wanted in ((1, 2), (2, 3), (3, 3), (4, 2), (5, 3)):
        why = "learner idle 44%, actors busy 100%"
        display.show(view(step, actors_wanted=wanted, actors_wanted_why=why))
        now[0] += 9

    told = [line for line in out.getvalue().splitlines() if "actors wanted" in line]
    assert told == ["demo: 3 actors wanted: learner idle 44%, actors busy 100%"] * 2
