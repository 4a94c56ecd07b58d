"""Exit code of a learner that ends well: the run is over, or its machine was taken from it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.loader import save
from configs.settings import Settings
from learner import __main__ as process

TOLD = 75


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder; what would train is stood in for, since only its end matters."""
    monkeypatch.setattr("learner.assembly.run_learner", lambda *_: summary(tmp_path).exists())
    monkeypatch.setattr(process, "launch", lambda *_, **__: 0)
    monkeypatch.setattr(process, "launch_node", lambda *_, **__: 0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    settings = Settings.model_validate(
        {"run": {"name": "far", "model": "init", "directory": str(tmp_path)}}
    )
    settings.run.folder.mkdir()
    save(settings, tmp_path / "config.yaml")
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def summary(folder: Path) -> Path:
    return folder / "far" / "summary.json"


def code(folder: Path, *words: str) -> int:
    return process.main([f"--config={folder}/config.yaml", *words])


ALONE: tuple[str, ...] = ()
RANKS = ("--set=learner.ranks=2",)
MACHINES = ("--nodes=2", "--node-rank=1", "--rendezvous=127.0.0.1:9")


@pytest.mark.parametrize("words", [ALONE, RANKS, MACHINES], ids=["alone", "ranks", "machines"])
def test_a_learner_that_was_told_to_go_has_the_code_of_its_settings(
    run: Path, words: tuple[str, ...]
) -> None:
    told = f"--set=learner.exit_when_told={TOLD}"

    assert code(run, *words) == 0
    assert code(run, *words, told) == TOLD
    summary(run).write_text('{"steps": 100}')
    assert code(run, *words, told, "--set=run.steps=100") == 0
    assert code(run, *words, told, "--set=run.steps=200") == TOLD


def test_a_machine_that_starts_again_after_the_last_batch_waits_for_nobody(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "launch_node", lambda *_, **__: 1)  # node 0 does not answer

    assert code(run, *MACHINES) == 1
    summary(run).write_text('{"steps": 100}')
    assert code(run, *MACHINES, "--set=run.steps=100") == 0
    assert code(run, *MACHINES, "--set=run.steps=200") == 1


def test_a_rank_that_was_told_to_go_has_not_failed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(process, "die_with_parent", lambda: None)

    assert code(run, f"--set=learner.exit_when_told={TOLD}") == 0


def test_an_error_of_a_rank_stays_what_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "launch", lambda *_, **__: 3)

    assert code(run, *RANKS, f"--set=learner.exit_when_told={TOLD}") == 3
