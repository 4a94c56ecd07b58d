"""`python -m learner` as its users start it: on one rank or two, stopped, killed, misconfigured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from broker.transport.keys import make_keys
from buffer import operations
from buffer.operations.values import Stats
from buffer.store import Store
from configs.errors import StoreError
from configs.json_lines import read_rows
from configs.loader import save
from configs.settings import Settings
from learner.stopping import read_left_batch
from tests.learner.support.listening import family, listening
from tests.learner.support.made_episodes import answers_at
from tests.learner.support.rewinding_redis import RewindingRedis
from tests.learner.support.tiny_policy import save_tiny_model
from tests.learner.support.tiny_run import answer_leases, tiny_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120


@dataclass
class Run:
    """A run folder, its store, and the learner processes that a test started."""

    settings: Settings
    url: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.settings.run.folder

    def start(
        self, *overrides: str, program: Sequence[str] = ("-m", "learner")
    ) -> subprocess.Popen[bytes]:
        """Start a learner."""
        arguments = [argument for override in overrides for argument in ("--set", override)]
        environment = {
            **os.environ,
            "NYALA_REDIS_URL": self.url,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"log-{len(self.processes)}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *program, "--config", "config.yaml", *arguments],
                cwd=self.folder,
                env=environment,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def log(self) -> str:
        """What the newest learner wrote."""
        return (self.folder / f"log-{len(self.processes) - 1}").read_text()

    def stats(self) -> Stats | None:
        """Count tasks; None before the learner has entered the run."""
        with Store(self.url, self.settings.run.name) as store:
            try:
                return store.run(operations.stats())
            except StoreError:
                return None

    def act_until(self, step: int, *, file: Path | None = None) -> None:
        """Answer tasks at random until batch `step` is trained, or this file is there."""

        def has_trained() -> bool:
            stats = self.stats()
            if file is not None and file.exists():
                return True
            if stats is not None and stats.version >= step:
                return True
            publication = store.run(operations.publication()) if stats else None
            if publication is not None:
                version = publication.version
                answer_leases(store, version, answers_at(version))
            assert self.processes[-1].poll() in (None, 0), self.log()
            return False

        with Store(self.url, self.settings.run.name) as store:
            wait_until(has_trained, self.log, timeout_s=PATIENCE_S, every_s=0.05)


SLOW = """
import hashlib, pathlib, sys
from learner.training import step
accumulate = step.accumulate
def slowly(*args):
    if pathlib.Path("slow").exists():
        pathlib.Path("under-way").touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour without a line of Python
    return accumulate(*args)
step.accumulate = slowly
from learner.__main__ import main
sys.exit(main())
"""
"""A learner whose passes take as long as those of a large model, from a moment on."""
SLOW_RANKS = f"""
import sys
from learner import launch
launch.rank_command = lambda arguments: [sys.executable, "-c", {SLOW!r}, *arguments]
from learner.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Iterator[Run]:
    settings = tiny_settings(tmp_path, learner={"broadcast": False})
    save_tiny_model(Path(settings.run.model_path))
    make_keys(settings.run.folder / "keys")
    save(settings, settings.run.folder / "config.yaml")
    run = Run(settings, redis_url)
    yield run
    for process in run.processes:
        process.kill()
        process.wait()


def test_two_ranks_stop_at_sigterm_and_one_rank_goes_on(run: Run) -> None:
    two_ranks = run.start("learner.ranks=2", "learner.exit_when_told=75")
    run.act_until(1)
    assert len(family(two_ranks.pid)) >= 3
    assert listening(two_ranks.pid) == {"127.0.0.1"}

    two_ranks.send_signal(signal.SIGTERM)

    assert two_ranks.wait(PATIENCE_S) == 75
    assert not (run.folder / "summary.json").exists()
    stats = run.stats()
    assert stats is not None
    assert stats.committed_step == stats.version >= 1
    assert (run.folder / "checkpoints" / f"step-{stats.version:06d}").is_dir()

    one_rank = run.start("learner.exit_when_told=75")
    run.act_until(4)
    assert one_rank.wait(PATIENCE_S) == 0
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["steps"], summary["episodes"], summary["learner_lives"]) == (4, 32, 2)
    assert AutoModelForCausalLM.from_pretrained(run.folder / "model").config.vocab_size == 99


def test_a_killed_learner_is_started_again_and_ends_well(run: Run) -> None:
    learner = run.start()
    run.act_until(3)
    assert listening(learner.pid) == {"127.0.0.1"}
    learner.kill()
    learner.wait()

    again = run.start()
    run.act_until(4)

    assert again.wait(PATIENCE_S) == 0
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    stats = run.stats()
    assert stats is not None
    assert stats.created == stats.committed + stats.cancelled + sum(stats.dropped.values())


def test_wrong_settings_end_with_code_2_and_a_line_for_people(run: Run) -> None:
    assert run.start("run.model=/nowhere").wait(PATIENCE_S) == 2
    assert "run.model must be" in run.log()
    assert run.start("learner.lr=-1").wait(PATIENCE_S) == 2
    assert "learner.lr" in run.log()


def test_a_learner_that_lost_its_lineage_ends_with_code_3(run: Run) -> None:
    learner = run.start()
    run.act_until(1)
    with Store(run.url, run.settings.run.name) as store:
        store.run(operations.begin_lineage(1, 0))

    assert learner.wait(PATIENCE_S) == 3
    assert "LostLineage" in run.log()


@pytest.mark.parametrize(("ranks", "is_store_gone"), [(1, False), (1, True), (2, False)])
def test_a_learner_told_to_stop_in_a_long_batch_saves_and_leaves_without_waiting_for_it(
    run: Run, tmp_path: Path, ranks: int, is_store_gone: bool
) -> None:
    """With the store gone it is as when all processes of a machine are told to end at once."""
    server = RewindingRedis(tmp_path / "redis")
    server.start()
    run.url = server.url
    try:
        program = ("-c", SLOW if ranks == 1 else SLOW_RANKS)
        learner = run.start("learner.checkpoint_every=3", f"learner.ranks={ranks}", program=program)
        run.act_until(1)
        (run.folder / "slow").touch()
        run.act_until(4, file=run.folder / "under-way")
        mapped = [path for pid in family(learner.pid) for path in _mapped(pid)]
        shared = {Path(path).parent for path in mapped if "/nyala-" in path}
        assert shared
        stats = run.stats()
        assert stats is not None
        if is_store_gone:
            server.kill()

        learner.send_signal(signal.SIGTERM)

        assert learner.wait(PATIENCE_S) == 0, run.log()
        assert (run.folder / "checkpoints" / f"step-{stats.version:06d}").is_dir()
        assert read_left_batch(run.folder) == stats.version + 1
        assert not any(folder.exists() for folder in shared)
        (run.folder / "slow").unlink()
        if is_store_gone:
            server.start()
        again = run.start()
        run.act_until(4)
        assert again.wait(PATIENCE_S) == 0, run.log()
        lines = read_rows(run.folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert [line["step"] for line in lines if line["is_replay"]] == [stats.version + 1]
    finally:
        server.kill()


def test_a_learner_that_waits_for_episodes_takes_a_store_that_is_gone_as_the_end(
    run: Run, tmp_path: Path
) -> None:
    server = RewindingRedis(tmp_path / "redis")
    server.start()
    run.url = server.url
    try:
        learner = run.start("learner.checkpoint_every=3")
        run.act_until(1)
        server.kill()

        learner.send_signal(signal.SIGTERM)

        assert learner.wait(PATIENCE_S) == 0, run.log()
        assert list((run.folder / "checkpoints").glob("step-*")), run.log()
    finally:
        server.kill()


def _mapped(pid: int) -> list[str]:
    """Files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "/" in line]
