"""Cards, names and commands of several actors on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.settings import ActorSettings, RunSettings, Settings
from console.run.process import Command
from console.verbs.roles import actor_commands, cards_of_actors
from tests.configs.support.fake_smi import hide_driver, install_smi

EIGHT = tuple("01234567")


@pytest.mark.parametrize(
    ("size", "count", "gpus", "visible", "expected"),
    [
        (1, None, "all", EIGHT, [*EIGHT]),
        (2, None, "all", EIGHT, ["01", "23", "45", "67"]),
        (2, 3, "all", EIGHT, ["01", "23", "45"]),
        (3, None, "all", EIGHT, ["012", "345"]),
        (1, None, "4, 6", EIGHT, ["4", "6"]),
        (2, 1, "7,5", EIGHT, ["75"]),
        (1, 2, None, EIGHT, ["0", "1"]),  # never two on one card
        (1, 2, None, (), ["", ""]),
        (1, None, None, (), [""]),
    ],
)
def test_each_actor_has_cards_of_its_own(
    size: int, count: int | None, gpus: str | None, visible: tuple[str, ...], expected: list[str]
) -> None:
    placed = cards_of_actors(size, count=count, gpus=gpus, visible=visible)

    assert ["".join(cards) for cards in placed] == expected


@pytest.mark.parametrize(
    ("size", "count", "gpus", "visible", "error"),
    [
        (1, None, "all", (), r"must be cards that we may use here \(none\), got all; see `nvidia"),
        (1, None, "0,8", EIGHT, r"\(0, 1, 2, 3, 4, 5, 6, 7\), got 0,8"),
        (1, None, "0,0", EIGHT, "must have each card once, got 0,0"),
        (1, 9, "all", EIGHT, r"at most 8 card\(s\) / actors.tensor_parallel_size 1 = 8, got 9"),
        (2, None, "3", EIGHT, r"at most 1 card\(s\) / actors.tensor_parallel_size 2 = 0, got 1"),
    ],
)
def test_cards_that_do_not_suffice_are_refused(
    size: int, count: int | None, gpus: str, visible: tuple[str, ...], error: str
) -> None:
    with pytest.raises(SettingsError, match=error):
        cards_of_actors(size, count=count, gpus=gpus, visible=visible)


def commands(folder: Path, *, size: int = 1, gpus: str | None = None) -> list[Command]:
    settings = Settings(
        run=RunSettings(model="m", name="far", directory=folder),
        actors=ActorSettings(tensor_parallel_size=size),
    )
    alone = Command("actor", "actor", ("python", "-m", "actors"), folder / "actor.log")
    return actor_commands(alone, settings, count=2, gpus=gpus)


def test_actors_of_cards_are_named_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_smi(monkeypatch, tmp_path, cards=8)
    monkeypatch.setattr("socket.gethostname", lambda: "node7.cluster.example.org")

    first, second = commands(tmp_path, size=2, gpus="4,5,6,7")

    assert [first.name, second.name] == ["actor-node7-gpu4-5", "actor-node7-gpu6-7"]
    assert second.arguments == ("python", "-m", "actors", "--name", "actor-node7-gpu6-7")
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert second.log == tmp_path / "far" / "logs" / "actor-node7-gpu6-7.log"


def test_logs_lie_in_the_scratch_folder_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smi(monkeypatch, tmp_path, cards=2)
    monkeypatch.setenv("NYALA_SCRATCH", str(tmp_path / "scratch"))

    assert {command.log.parent for command in commands(tmp_path)} == {tmp_path / "scratch/logs"}


def test_actors_on_the_cpu_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_driver(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")

    planned = commands(tmp_path)

    assert [command.name for command in planned] == ["actor-node7-0", "actor-node7-1"]
    assert "CUDA_VISIBLE_DEVICES" not in planned[0].environment
