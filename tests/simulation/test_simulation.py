"""Whole runs in virtual time, under every fault at once; and broken code that they must notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from actors.episodes.agent_mail import AgentMail, _Letter
from actors.episodes.held_leases import HeldLeases
from broker.protocol.conversation_messages import Say
from broker.protocol.messages import Beat, SubmitRequest, TaskVerdict, Verdict, Verdicts
from broker.server.service import Service
from configs import durable
from configs.errors import CheckpointError
from learner.checkpointing import resume
from learner.checkpointing.folders import LINEAGES, UNFINISHED
from tests.simulation.disk import FaultyDisk
from tests.simulation.nemesis import Rates
from tests.simulation.scenario import Scenario, brief, brief_agents, brief_teachers
from tests.simulation.simulation import simulate

ROOT = Path(__file__).parents[2]
NO_FAULTS = Rates(
    crash=0,
    drain=0,
    pause=0,
    partition=0,
    broker_crash=0,
    broker_crash_at_grant=0,
    broker_pause=0,
    store_away=0,
    store_rewind=0,
    learner_crash=0,
    learner_twin=0,
    power_loss=0,
    disk_full=0,
    host_crash=0,
    host_pause=0,
    host_partition=0,
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_nothing_is_lost_repeated_or_mixed_whatever_goes_wrong(tmp_path: Path, seed: int) -> None:
    result = simulate(Scenario(seed=seed), tmp_path)

    assert result.figures["steps"] > 0
    assert result.figures["network"]["lost"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 5))
def test_five_short_simulations_survive_a_death_of_each_role(tmp_path: Path, first: int) -> None:
    counts = Counter[str]()
    for seed in range(first, first + 5):
        result = simulate(brief(seed), tmp_path / str(seed))
        counts.update(result.figures["counts"])

        assert result.figures["steps"] > 0, seed
    deaths = ("deaths of actors", "deaths of brokers", "deaths of the learner")
    for fault in (*deaths, "power losses", "rewinds"):
        assert counts[fault] > 0, f"no {fault} in these five: the nemesis is too mild"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_whatever_teachers_die_each_episode_is_scored(tmp_path: Path, first: int) -> None:
    counts = Counter[str]()
    for seed in range(first, first + 5):
        result = simulate(brief_teachers(seed), tmp_path / str(seed))
        counts.update(result.figures["counts"])

        assert result.figures["steps"] > 0, seed
    for fault in ("deaths of actors", "deaths of teachers", "deaths of brokers", "rewinds"):
        assert counts[fault] > 0, f"no {fault} in these five: the nemesis is too mild"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_conversations_of_live_agents_survive_all_but_their_hosts(
    tmp_path: Path, first: int
) -> None:
    counts = Counter[str]()
    for seed in range(first, first + 3):
        result = simulate(brief_agents(seed), tmp_path / str(seed))
        counts.update(result.figures["counts"])

        assert result.figures["steps"] > 0, seed
    for fault in ("deaths of actors", "deaths of brokers", "deaths of hosts", "rewinds"):
        assert counts[fault] > 0, f"no {fault} in these three: the nemesis is too mild"
    assert counts["answers heard"] > counts["agents"] > counts["conversations lost"]


@pytest.mark.slow
def test_a_tool_that_takes_five_minutes_loses_neither_lease_nor_ticket_nor_turn(
    tmp_path: Path,
) -> None:
    quiet = replace(brief_agents(3), rates=NO_FAULTS, certain_faults=())
    story = replace(quiet, faulty_s=1.0, work_s=300.0)  # leases of 10 s, progress within 120

    counts = simulate(story, tmp_path).figures["counts"]

    assert counts["answers heard"] > 20
    assert counts["agents"] == counts["tasks with agents"]
    assert counts["reaped"] == 0
    assert not {"beat TAKEN", "beat STALE", "release OK", "fail OK"} & counts.keys()


def test_an_actor_that_replies_before_the_tokens_are_stored_is_caught(tmp_path: Path) -> None:
    def hasty(mail: AgentMail) -> Iterator[_Letter]:
        for held, rollout in list(mail._speaking.items()):
            stored = held.num_stored
            place = Beat(held.lease.task_id, held.lease.fence, stored)
            replies = rollout.replies.items() if stored else ()
            says = [Say(place, held.ticket, n, stored, reply) for n, (_, reply) in replies]
            yield _Letter(held, rollout, tuple(says))
            mail._speaking.pop(held)

    with (
        mock.patch.object(AgentMail, "_letters", hasty),
        pytest.raises(AssertionError, match="OUTPUT"),
    ):
        simulate(brief_agents(0), tmp_path)


@pytest.mark.slow
def test_without_faults_nothing_expires_and_nothing_is_made_twice(tmp_path: Path) -> None:
    result = simulate(Scenario(seed=3, faulty_s=1, rates=NO_FAULTS), tmp_path)

    counts = result.figures["counts"]
    assert counts["reaped before the calm"] == 0
    # A heartbeat may be on its way while its lease ends by a failure that is its actor's own.
    assert counts.get("beat STALE", 0) < counts["fail OK"]
    assert "submit STALE" not in counts
    assert counts["lives of the learner"] == 1


@pytest.mark.slow
def test_an_outage_of_the_store_costs_no_lease(tmp_path: Path) -> None:
    assert _reaped_in_outages(tmp_path) == 0


@pytest.mark.slow
def test_a_broker_that_dies_between_a_grant_and_its_answer_costs_no_attempt(tmp_path: Path) -> None:
    rates = replace(NO_FAULTS, broker_crash_at_grant=480.0)
    scenario = Scenario(seed=1, actors=4, brokers=1, rates=rates)

    counts = simulate(scenario, tmp_path).figures["counts"]

    assert counts["grants repeated"] > 0
    assert counts.get("reaped before the calm", 0) == 0


STORIES = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.simulation.scenario import brief, brief_agents
from tests.simulation.simulation import simulate

for seed in (4, 5):
    scenario = replace(brief(seed), actors=5)
    print(simulate(scenario, Path(sys.argv[1], f"there-{seed}")).trace_hash)
scenario = replace(brief_agents(2), faulty_s=8.0)
print(simulate(scenario, Path(sys.argv[1], "there-agents")).trace_hash)
"""


@pytest.mark.slow
def test_the_same_seed_is_the_same_story_in_another_process(tmp_path: Path) -> None:
    here = [
        simulate(replace(brief(seed), actors=5), tmp_path / f"here-{seed}").trace_hash
        for seed in (4, 5)
    ]
    agents = replace(brief_agents(2), faulty_s=8.0)
    here.append(simulate(agents, tmp_path / "here-agents").trace_hash)
    # Texts hash differently there: here they do by chance, or as an environment variable says.
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"

    done = subprocess.run(
        [sys.executable, "-c", STORIES, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )

    assert done.stdout.split() == here


def test_a_broker_that_acknowledges_before_it_writes_is_caught(tmp_path: Path) -> None:
    write = Service._write

    async def hasty(self: Service, message: object, peer: Any) -> Any:
        if not isinstance(message, SubmitRequest):
            return await write(self, message, peer)
        return Verdicts(tuple(TaskVerdict(s.task_id, Verdict.OK) for s in message.submissions))

    with mock.patch.object(Service, "_write", hasty):
        _must_fail("I10|I15", tmp_path)  # found missing, or waited for in vain


def test_an_actor_that_ignores_gaps_is_caught(tmp_path: Path) -> None:
    apply = HeldLeases.apply_verdicts

    def deaf(self: HeldLeases, beats: Any, verdicts: Any) -> Any:
        heard = [
            structs.replace(v, length=b.offset + b.num_tokens) if v.verdict is Verdict.GAP else v
            for b, v in zip(beats, verdicts, strict=True)
        ]
        return apply(self, beats, heard)

    with mock.patch.object(HeldLeases, "apply_verdicts", deaf):
        _must_fail("GAP", tmp_path, rewinds=True)


def test_a_checkpoint_that_is_renamed_before_it_is_synced_is_caught(tmp_path: Path) -> None:
    sync = FaultyDisk.sync

    def hasty(disk: FaultyDisk, path: Path) -> None:
        if UNFINISHED not in str(path):
            sync(disk, path)

    with mock.patch.object(FaultyDisk, "sync", hasty):
        _must_lose("COMMIT|must be intact", tmp_path, "power_loss")


def test_lineages_that_are_not_synced_are_caught(tmp_path: Path) -> None:
    def hasty(folder: Path, lineages: dict[int, int]) -> None:
        durable.DISK.remove(folder / LINEAGES)
        durable.DISK.write(folder / LINEAGES, json.dumps(lineages).encode())

    with mock.patch.object(resume, "write_lineages", hasty):
        _must_lose("LINEAGE|must map", tmp_path, "power_loss", "store_rewind")


def _must_lose(invariant: str, folder: Path, *faults: str) -> None:
    """Assert that some short seed notices when these faults strike twice."""

    def hunt() -> None:
        for seed in range(8):
            story = replace(brief(seed), liars=0, rates=NO_FAULTS, certain_faults=faults * 2)
            simulate(story, folder / str(seed))

    with pytest.raises((AssertionError, CheckpointError), match=invariant):
        hunt()


def _must_fail(invariant: str, folder: Path, *, rewinds: bool = False) -> None:
    """Assert that some seed notices."""
    rates = replace(NO_FAULTS, store_rewind=240.0) if rewinds else Rates()

    def hunt() -> None:
        for seed in range(4):
            simulate(Scenario(seed=seed, actors=6, rates=rates), folder / str(seed))

    with pytest.raises(AssertionError, match=invariant):
        hunt()


def _reaped_in_outages(folder: Path) -> int:
    """Take the store away for longer than a lease lasts, while all actors live."""
    rates = replace(NO_FAULTS, store_away=240.0)
    scenario = Scenario(seed=2, actors=4, outage_s=(20.0, 25.0), rates=rates)
    counts = simulate(scenario, folder).figures["counts"]
    assert counts["store_away"] > 0
    return int(counts.get("reaped before the calm", 0))
