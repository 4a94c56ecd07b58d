"""The log of versions, and the times for which learner and actors paused for them."""

import json
from dataclasses import replace

import pytest

from broker.protocol.weight_messages import Join
from buffer.record.episode import PolicyVersion
from learner.weights.log import (
    FILE_NAME,
    VersionDelivery,
    WeightLog,
    paused_fraction,
    read_weight_log,
)
from learner.weights.server import Pauses
from tests.weights.support.scripted_publisher import manifest


def sent(step: int, **changes) -> VersionDelivery:
    plain = VersionDelivery(PolicyVersion(1, step), 2, 1, 3, is_complete=True, wall_s=0.25)
    return replace(plain, **changes)


def join(paused_s: float, served_s: float) -> Join:
    return Join(PolicyVersion(1, 1), True, "cpu", paused_s, served_s)


def test_the_log_says_what_each_version_was_and_what_became_of_it(tmp_path):
    log = WeightLog(tmp_path / "run")
    log.sealed(manifest(1), held_s=0.5)
    log.delivered(sent(1, sparse_bytes=7))
    WeightLog(tmp_path / "run").sealed(manifest(1, lineage=2), held_s=0.5)  # the next life

    lines = list(read_weight_log(tmp_path / "run"))

    assert [(line["event"], line["version"]) for line in lines] == [
        ("sealed", [1, 1]),
        ("delivered", [1, 1]),
        ("sealed", [2, 1]),
    ]
    assert lines[0]["digest"] == manifest(1).digest
    assert (lines[0]["num_bytes"], lines[0]["dtype"]) == (manifest(1).num_bytes, "bfloat16")
    assert (lines[1]["members"], lines[1]["sparse_bytes"]) == (1, 7)


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    WeightLog(tmp_path).sealed(manifest(1), held_s=0.5)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(json.dumps({"event": "sealed"})[:9])

    assert len(list(read_weight_log(tmp_path))) == 1
    assert list(read_weight_log(tmp_path / "no such run")) == []


def test_pauses_are_what_joins_add_to_those_before(tmp_path):
    pauses = Pauses()

    pauses.on_join("a", join(0.0, 0.0))
    pauses.on_join("a", join(0.1, 2.0))
    pauses.on_join("b", join(5.0, 100.0))  # heard by an earlier publisher too: only what it adds
    pauses.on_join("b", join(5.1, 103.0))
    pauses.forget_all_but({"a"})
    pauses.on_join("b", join(9.0, 200.0))
    pauses.on_join("a", join(0.1, 4.0))

    assert pauses.paused_s == pytest.approx(0.2)
    assert pauses.served_s == pytest.approx(7.0)


def test_the_paused_fraction_is_that_of_the_newest_report(tmp_path):
    log = WeightLog(tmp_path)
    assert paused_fraction(tmp_path) is None
    log.delivered(sent(1))
    assert paused_fraction(tmp_path) is None  # nobody has served yet

    log.delivered(sent(2, paused_s=1.0, served_s=10.0))
    log.delivered(sent(3, paused_s=1.0, served_s=50.0))

    assert paused_fraction(tmp_path) == 0.02
