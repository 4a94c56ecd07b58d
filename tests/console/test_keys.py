"""`nyala keys` as a person types it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from broker.transport.allow_list import AllowList, read_allowed
from broker.transport.enrolled import EnrolledKeys
from broker.transport.keys import load_pair, new_pair
from console.main import app


def keys(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    return done.exit_code, done.output


def test_a_folder_alone_makes_keys(tmp_path: Path) -> None:
    assert keys(tmp_path / "keys") == (0, f"{tmp_path / 'keys'}\n")
    assert keys("make", tmp_path / "keys")[0] == 0
    assert load_pair(tmp_path / "keys", "enrolment").public in read_allowed(tmp_path / "keys")


def test_keys_are_added_listed_rotated_and_revoked(tmp_path: Path) -> None:
    keys(tmp_path / "keys")

    assert keys("add", "eve", "--role", "observer", "--in", tmp_path)[0] == 0  # the run's folder
    assert keys("add", "spot-7", "--in", tmp_path / "keys")[1].strip().endswith("spot-7.key")
    lines = keys("list", "--in", tmp_path)[1].splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["enrolment", "enrolment"],
        ["observer", "eve"],
        ["actor", "spot-7"],
    ]
    assert "`nyala keys revoke spot-7.previous`" in keys("rotate", "spot-7", "--in", tmp_path)[1]
    assert "off the list" in keys("revoke", "spot-7.previous", "--in", tmp_path)[1]
    assert len(read_allowed(tmp_path / "keys")) == 3


def test_registered_keys_are_listed_after_their_enrolment_key(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys(folder)
    keys("add", "a-later-name", "--in", folder)
    registered = EnrolledKeys(folder, AllowList(folder), max_keys=9)
    name = registered.register(new_pair().public, "enrolment")

    lines = [line.split() for line in keys("list", "--in", folder)[1].splitlines()]

    assert [line[:2] for line in lines] == [
        ["actor", "a-later-name"],
        ["enrolment", "enrolment"],
        ["actor", name],
    ]
    assert lines[2][3:] == ["seen", "0", "s", "ago"]
    assert keys("revoke", "enrolment", "--in", folder)[0] == 0
    assert len(keys("list", "--in", folder)[1].splitlines()) == 1


def test_the_brokers_key_is_announced_before_it_is_used(tmp_path: Path) -> None:
    keys(tmp_path / "keys")
    old = load_pair(tmp_path / "keys", "broker")

    code, text = keys("rotate", "broker", "--in", tmp_path)
    assert (code, "must be announced" in text) == (2, True)
    assert keys("announce", "--in", tmp_path)[1].strip().endswith("broker.next.pub")
    assert keys("rotate", "broker", "--in", tmp_path)[0] == 0
    assert load_pair(tmp_path / "keys", "broker") != old


def test_mistakes_are_refused_with_the_next_step(tmp_path: Path) -> None:
    assert keys("list", "--in", tmp_path)[1].endswith(f"make keys with `nyala keys {tmp_path}`\n")
    keys(tmp_path / "keys")
    for arguments, complaint in [
        (
            ("add", "x", "--role", "king"),
            "--role must be one of actor, enrolment, host, observer, operator",
        ),
        (("add", "enrolment"), "must be free, got enrolment"),
        (("revoke", "nobody"), "names there: enrolment"),
        (("rotate", "nobody"), "got 0 of nobody"),
    ]:
        code, text = keys(*arguments, "--in", tmp_path)
        assert (code, complaint in text) == (2, True), text
