"""Lives of actors: joins and deaths, from the broker's audit and from the batches."""

import re
from datetime import UTC, datetime

from console.report.curves import read_curves
from console.report.record import IncarnationEnd, actor_lives, read_run
from console.report.run_charts import MAX_ROWS, actor_chart
from tests.console.support.made_run import BATCH_S, BEGAN, made_run, write_lines


def at(step):
    return BEGAN + BATCH_S * step


def event(what, actor, step):
    return {
        "time": datetime.fromtimestamp(at(step), UTC).isoformat(),
        "event": f"actor {what}",
        "actor": actor,
    }


def by_actor(step):
    """Actor a throughout, b to batch 10, c from batch 8 to 20, d from batch 22 on."""
    names = {"a": True, "b": step <= 10, "c": 8 <= step <= 20, "d": step >= 22}
    return {"episodes_by_actor": {name: 2 for name, is_there in names.items() if is_there}}


def lives_of(folder):
    curves = read_curves(folder / "metrics.jsonl", ["loss"])
    return {life.name: life for life in actor_lives(folder, curves, max_policy_lag=2)}


def test_joins_and_deaths_are_those_of_the_broker(tmp_path):
    folder = made_run(tmp_path / "r", steps=30, metrics=by_actor)
    events = [event("joined", "a", 0), event("joined", "b", 0), event("joined", "c", 7)]
    events += [event("replaced", "b", 12), event("left", "c", 19), event("joined", "d", 21)]
    events += [event("left", "a", 31)]
    write_lines(folder / "logs" / "audit.jsonl", events)

    lives = lives_of(folder)

    assert {name: life.end for name, life in lives.items()} == {
        "a": IncarnationEnd.OPEN,
        "b": IncarnationEnd.DIED,
        "c": IncarnationEnd.LEFT,
        "d": IncarnationEnd.OPEN,
    }
    assert (lives["c"].began, lives["c"].ended) == (at(7), at(19))
    assert (lives["b"].began, lives["b"].ended) == (at(0), at(10))
    assert (lives["a"].ended, lives["a"].episodes) == (at(30), 60)


def test_an_actor_that_fell_silent_or_took_no_leave_is_said_to_have_died(tmp_path):
    folder = made_run(tmp_path / "r", steps=12, metrics=by_actor)
    events = [event("joined", name, 0) for name in "ab"]
    events += [event("lost", "b", 11)]
    write_lines(folder / "logs" / "audit.jsonl", events)

    lives = lives_of(folder)

    assert {name: lives[name].end for name in "ab"} == {
        "a": IncarnationEnd.OPEN,
        "b": IncarnationEnd.DIED,
    }
    assert lives["b"].ended == at(10)


def test_without_an_audit_the_batches_tell(tmp_path):
    folder = made_run(tmp_path / "r", steps=30, metrics=by_actor)

    lives = lives_of(folder)

    assert (lives["b"].began, lives["b"].ended, lives["b"].end) == (
        at(1),
        at(10),
        IncarnationEnd.DIED,
    )
    assert (lives["d"].began, lives["d"].ended, lives["d"].end) == (
        at(22),
        at(30),
        IncarnationEnd.OPEN,
    )


def test_a_crowd_is_drawn_as_its_number(tmp_path):
    def crowd(step):
        """61 actors, of which the first two die after batch 5."""
        names = range(0 if step <= 5 else 2, MAX_ROWS + 1)
        return {"episodes_by_actor": {f"actor-{number}": 1 for number in names}}

    folder = made_run(tmp_path / "r", steps=30, metrics=crowd)

    chart = actor_chart(read_run(folder))

    assert chart is not None
    (shape,) = chart.shapes
    heights = [float(point.split()[1]) for point in re.split("[ML]", shape.path)[1:]]
    assert min(heights) < heights[-1] < heights[0]
    assert chart.y_ticks[-1].label == "60"


def test_a_learner_that_came_back_is_marked(tmp_path):
    folder = made_run(tmp_path / "r", metrics=lambda step: {"lineage": 1 if step < 3 else 2})

    chart = actor_chart(read_run(folder))

    assert chart is not None
    assert "life 2 of the learner" in [spot.text for spot in chart.spots]
    assert chart.legend[-1].label == "the learner began again"


def test_an_actor_that_died_before_its_first_episode_lived_until_its_end_was_noticed(tmp_path):
    folder = made_run(tmp_path / "r", steps=30, metrics=by_actor)
    events = [event("joined", "a", 0), event("joined", "e", 2), event("replaced", "e", 6)]
    events += [event("joined", "f", 3)]
    write_lines(folder / "logs" / "audit.jsonl", events)

    lives = lives_of(folder)

    assert (lives["e"].began, lives["e"].ended, lives["e"].end) == (
        at(2),
        at(6),
        IncarnationEnd.DIED,
    )
    # Nobody has noted its end, which was at some time before that of the run.
    assert (lives["f"].began, lives["f"].ended, lives["f"].end) == (
        at(3),
        at(30),
        IncarnationEnd.DIED,
    )
