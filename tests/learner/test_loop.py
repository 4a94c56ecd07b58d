"""The learner's loop against a real store: it learns, resumes, and accounts for every task."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer import operations
from buffer.operations.values import Stats
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from configs.errors import CheckpointError, LostLineage, OutOfMemory
from configs.settings import Settings
from learner import coordinator, loop, rank_zero
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.folders import complete_checkpoints
from learner.checkpointing.tensors import Shards
from learner.data import batch
from learner.data.curriculum import Feeder
from learner.model.ranks import Ranks
from learner.model.saved_model import local_of
from learner.phase_names import PHASES
from learner.reporting.samples import read_samples
from learner.stopping import LEFT_BATCH_FILE
from learner.training import step
from learner.weights.layout import unwrapped_name
from tests.learner.support.ring_in_process import ActorThread, LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings
from tests.waiting import wait_until

SLOW_S = 0.3


def _settings(folder: Path, *, num_minibatches: int = 1, **run: object) -> Settings:
    return tiny_settings(
        folder,
        run={"groups_per_batch": 4, "group_size": 4, "steps": 6, **run},
        learner={"lr": 1e-2, "checkpoint_every": 2, "adam_beta2": 0.95},
        algorithm={"entropy_bonus": 0.01, "num_minibatches": num_minibatches},
    )


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def _stats(url: str) -> Stats:
    with Store(url, "tiny") as store:
        return store.run(operations.stats())


def _is_conserved(stats: Stats) -> bool:
    ended = stats.committed + sum(stats.dropped.values()) + stats.dead + stats.cancelled
    return stats.created == ended


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_of_adapters_leaves_them_beside_the_merged_model(
    rank: int, redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(tmp_path, run={"steps": 2}, learner={"lora_rank": rank})

    assert RingInProcess(settings, redis_url, ranks).live()

    assert (settings.run.folder / "model" / "config.json").exists()
    assert (settings.run.folder / "adapter" / "adapter_config.json").exists() is bool(rank)


@pytest.mark.slow
def test_a_run_learns_and_leaves_what_it_promises(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = _settings(tmp_path, steps=30, groups_per_batch=16, eval_every=10, eval_episodes=16)
    ring = RingInProcess(settings, redis_url, ranks)

    assert ring.live()

    folder = settings.run.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out_accuracy_before"] <= 0.5
    assert summary["held_out_accuracy_after"] >= 0.9
    assert [line["step"] for line in _lines(folder, "eval.jsonl")] == [0, 10, 20, 30]
    metrics = _lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 31))
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.4
    assert all(line["policy_lag_max"] <= 1 for line in metrics)
    assert all(abs(line["lag0_ratio_mean"] - 1) < 1e-3 for line in metrics)
    stats = _stats(redis_url)
    assert (stats.state, stats.committed) == ("ENDED", 30 * 64)
    assert _is_conserved(stats)
    assert summary["tasks_committed"] == summary["episodes"] == stats.committed
    assert summary["trained_tokens"] == stats.committed
    assert 0 <= summary["learner_idle_fraction"] <= 1
    assert 0 <= summary["learner_idle_for_weights_fraction"] < 1

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trained = ring.shelf.history[PolicyVersion(1, 30)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained, strict=True))
    assert AutoTokenizer.from_pretrained(folder / "model").decode([3]) == "a"


def test_the_first_batch_of_a_life_is_a_stage_of_its_start(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    with capture_logs() as lines:
        assert RingInProcess(_settings(tmp_path, steps=3), redis_url, ranks).live()

    stages = [line["stage"] for line in lines if "stage" in line]
    assert stages == ["training the first batch"]


def test_the_next_batch_is_claimed_while_weights_are_handed_over_and_trained_after(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    claimed, train = threading.Event(), step.train_batch
    ring = RingInProcess(_settings(tmp_path, steps=2), redis_url, ranks)

    usual_s = sys.getswitchinterval()

    def on_publish(step: int) -> None:
        if step == 1:
            assert claimed.wait(30.0)  # of batch 2, by the other thread
            assert sys.getswitchinterval() < usual_s / 5, "publishing is served sooner"
            time.sleep(SLOW_S)
        events.append(f"published {step}")

    def pack(*args: Any, **kwargs: Any) -> Any:
        if events and events[-1] == "trained":
            events.append("packed")
            claimed.set()
        return batch.pack(*args, **kwargs)

    def train_batch(*args: Any, **kwargs: Any) -> Any:
        assert sys.getswitchinterval() == pytest.approx(usual_s)
        trained = train(*args, **kwargs)
        events.append("trained")
        return trained

    monkeypatch.setattr(loop, "pack", pack)
    monkeypatch.setattr(loop, "train_batch", train_batch)
    ring.shelf.on_publish = on_publish

    assert ring.live()

    steps = ["published 0", "trained", "packed", "published 1", "trained", "published 2"]
    assert events == steps
    assert sys.getswitchinterval() == pytest.approx(usual_s)
    first, second = _lines(ring.settings.run.folder, "metrics.jsonl")
    assert first["gather_s"] < SLOW_S <= second["gather_s"] + 0.1 * SLOW_S


@pytest.mark.slow
def test_a_checkpoint_waits_for_the_publication_whose_probe_runs_the_model(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    saving, begin = threading.Event(), Checkpoints.begin_save
    ring = RingInProcess(_settings(tmp_path, steps=2), redis_url, ranks)

    def on_publish(step: int) -> None:
        if step == 2:
            saving.wait(SLOW_S)  # long enough for a checkpoint that does not wait
        events.append(f"published {step}")

    def saved(*args: Any, **kwargs: Any) -> None:
        saving.set()
        events.append("saved")
        begin(*args, **kwargs)

    monkeypatch.setattr(Checkpoints, "begin_save", saved)
    ring.shelf.on_publish = on_publish

    assert ring.live()

    assert events == ["published 0", "published 1", "published 2", "saved"]


def test_a_line_of_metrics_has_every_phase_and_a_trace_names_them(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "stated_peak", lambda *_: 1e-3)  # of a slow card
    settings = tiny_settings(tmp_path, run={"steps": 3}, learner={"profile_steps": [2]})
    ring = RingInProcess(settings, redis_url, ranks)

    assert ring.live()

    folder = ring.settings.run.folder
    for line in _lines(folder, "metrics.jsonl"):
        assert all(line[f"{name}_s"] >= 0 for name in PHASES)
        assert all(line[f"{name}_s"] > 0 for name in ("wait", "forward", "backward", "optimizer"))
        assert line["trained_tokens_per_s"] > 0 and line["peak_gib"] is None
        assert line["mfu"] > 0 and line["peak_tflops"] == 1e-3
    [file] = (folder / "traces").iterdir()
    assert file.name == "batch-000002-rank-0.json"
    events = json.loads(file.read_text())["traceEvents"]
    spans = {event["name"]: event["dur"] for event in events if event.get("ph") == "X"}
    inside = ("wait", "pack", "forward", "backward", "clip", "optimizer")
    assert all(spans[f"nyala.{name}"] > 0 for name in inside)
    assert "aten::mm" in spans


@pytest.mark.slow
def test_a_killed_learner_resumes_replays_and_ends_well(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    ring.shelf.end_life_at = 3  # step 3 is trained and advanced, the checkpoint is of step 2
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    before, after = (ring.shelf.history[PolicyVersion(lineage, 3)] for lineage in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    metrics = _lines(ring.settings.run.folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["lineage"] for line in metrics] == [1, 1, 2, 2, 2, 2]
    assert metrics[2]["is_replay"]
    stats = _stats(redis_url)
    assert stats.committed == 6 * 16
    assert _is_conserved(stats)
    summary = json.loads((ring.settings.run.folder / "summary.json").read_text())
    assert (summary["episodes"], summary["learner_lives"]) == (6 * 16, 2)


@pytest.mark.slow
def test_a_run_that_filters_trains_only_what_teaches_and_accounts_for_the_rest(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(
        tmp_path,
        run={"groups_per_batch": 4, "group_size": 4, "steps": 6},
        learner={"lr": 1e-2, "checkpoint_every": 2},
        algorithm={"filter_zero_variance": True, "max_gen_batches": 1000},
    )
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 3
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    before, after = (ring.shelf.history[PolicyVersion(lineage, 3)] for lineage in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    metrics = _lines(settings.run.folder, "metrics.jsonl")
    assert [line["zero_variance_groups"] for line in metrics] == [0] * 6
    stats = _stats(redis_url)
    assert stats.committed == 6 * 16
    assert stats.dropped.get("zero_variance", 0) % 4 == 0  # whole groups
    assert _is_conserved(stats)


def test_batches_that_crowd_redis_are_committed_before_a_checkpoint_is_due(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(
        tmp_path, learner={"checkpoint_every": 100}, buffer={"max_uncommitted_bytes": 1}
    )
    committed: list[int] = []
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.on_publish = lambda _: committed.append(_stats(redis_url).committed_step)

    assert ring.live()

    # At the publication of step k the checkpoint of k - 1 may be under way; of k - 2 it is not.
    assert all(step - 2 <= found < max(step, 1) for step, found in enumerate(committed))
    assert len(committed) == 5
    batches = _lines(settings.run.folder, "batches.jsonl")
    assert all(
        line.keys() == {"step", "lineage", "group_ids", "reused_group_ids"} for line in batches
    )


def test_a_repeatable_run_publishes_only_what_no_death_can_take_back(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(tmp_path, run={"max_policy_lag": 0}, learner={"checkpoint_every": 1})
    run = settings.run.model_copy(update={"deterministic": True})
    committed: list[int] = []
    ring = RingInProcess(settings.model_copy(update={"run": run}), redis_url, ranks)
    ring.shelf.on_publish = lambda _: committed.append(_stats(redis_url).committed_step)

    assert ring.live()

    assert committed == [0, 1, 2, 3, 4]
    batches = _lines(settings.run.folder, "batches.jsonl")
    assert [line["group_ids"] for line in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len({line["digest"] for line in batches}) == 4


def test_a_batch_that_does_not_fit_into_memory_is_trained_in_smaller_pieces_by_the_next_life(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[tuple[int, int]] = []
    plan_batch, train = batch.plan_batch, step.train_batch
    ring = RingInProcess(_settings(tmp_path, steps=4), redis_url, ranks)

    def planned(step: int, *args: Any, **kwargs: Any) -> Any:
        budgets.append((step, kwargs["microbatch_tokens"]))
        return plan_batch(step, *args, **kwargs)

    def train_batch(policy: Any, optimizer: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if budgets[-1] == (3, 16384):
            torch.empty(2**62, dtype=torch.uint8)
        return train(policy, optimizer, step, *args, **kwargs)

    monkeypatch.setattr(coordinator, "plan_batch", planned)
    monkeypatch.setattr(loop, "train_batch", train_batch)

    with pytest.raises(OutOfMemory, match=r"batch 3 .* trains the batch with microbatches of 8192"):
        ring.live()
    assert ring.live()

    assert budgets == [(1, 16384), (2, 16384), (3, 16384), (3, 8192), (4, 8192)]
    assert _is_conserved(_stats(redis_url))


def test_a_learner_killed_before_its_first_checkpoint_begins_again(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    ring = RingInProcess(_settings(tmp_path, steps=2), redis_url, ranks)
    ring.shelf.end_life_at = 1
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    before, after = (ring.shelf.history[PolicyVersion(lineage, 1)] for lineage in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert _is_conserved(_stats(redis_url))


def test_a_learner_asked_to_stop_checkpoints_commits_and_goes_on_later(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    ring.shelf.on_publish = lambda step: ring.stopping.set() if step == 3 else None

    assert not ring.live()

    folder = ring.settings.run.folder
    last = _lines(folder, "metrics.jsonl")[-1]["step"]
    assert last in (3, 4)  # step 3 was being handed over, batch 4 may have been claimed meanwhile
    assert (folder / "checkpoints" / f"step-{last:06d}").is_dir()
    assert not (folder / "summary.json").exists()
    assert _stats(redis_url).committed_step == last

    ring.stopping.clear()
    ring.shelf.on_publish = lambda _: None
    assert ring.live()
    assert [line["step"] for line in _lines(folder, "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stop_at", [(1, 1), (3, 1), (3, 2), (4, 2)])
def test_a_stop_in_the_middle_of_a_batch_saves_the_state_before_it_and_the_batch_is_replayed(
    redis_url: str,
    tmp_path: Path,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    stop_at: tuple[int, int],
) -> None:
    """Passes go on for as long as the thread saves, and no optimizer step follows them."""
    cut, minibatches = stop_at
    accumulate, minibatch = step.accumulate, 0
    parameters: dict[str, Any] = {}
    ring = RingInProcess(_settings(tmp_path, num_minibatches=minibatches), redis_url, ranks)
    left = ring.settings.run.folder / LEFT_BATCH_FILE

    def slowly(policy: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal minibatch
        if ring.shelf.version.step == cut - 1 and not left.exists():
            minibatch += 1
            for name, tensor in policy.named_parameters():
                parameters.setdefault(unwrapped_name(name), local_of(tensor).detach().clone())
            if minibatch == minibatches:
                ring.stopping.set()
                wait_until(left.exists, "the batch is left while its microbatch is under way")
        return accumulate(policy, *args, **kwargs)

    monkeypatch.setattr(step, "accumulate", slowly)
    assert not ring.live()

    folder = ring.settings.run.folder
    saved = [path.name for path in complete_checkpoints(folder / "checkpoints")]
    assert saved[-1:] == ([f"step-{cut - 1:06d}"] if cut > 1 else [])
    assert _stats(redis_url).committed_step == cut - 1
    sealed = next(claim for claim in _stats(redis_url).claims if claim.k == cut)
    assert (sealed.sealed, sealed.starts) == (True, 1)
    if saved:
        shards = Shards(folder / "checkpoints" / saved[-1])
        assert all(
            torch.equal(shards.read_whole(f"model.{name}"), tensor)
            for name, tensor in parameters.items()
        )

    monkeypatch.undo()
    ring.stopping.clear()
    assert ring.live()
    metrics = _lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics if line["is_replay"]] == [cut]
    assert not left.exists()
    assert _is_conserved(_stats(redis_url))


def test_stops_in_one_batch_do_not_count_as_its_failures(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is given up after `learner.max_claim_attempts` starts, three by default."""
    accumulate = step.accumulate
    ring = RingInProcess(_settings(tmp_path, steps=2), redis_url, ranks)
    left = ring.settings.run.folder / LEFT_BATCH_FILE

    def stop(*args: Any, **kwargs: Any) -> Any:
        ring.stopping.set()
        wait_until(left.exists, "the batch is left")
        return accumulate(*args, **kwargs)

    for _time in range(5):
        with monkeypatch.context() as patched:
            patched.setattr(step, "accumulate", stop)
            assert not ring.live()
        ring.stopping.clear()

    assert ring.live()
    assert _stats(redis_url).dead == 0


def test_a_finished_run_lives_again_without_training(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    ring = RingInProcess(_settings(tmp_path, steps=2), redis_url, ranks)
    assert ring.live()

    assert ring.live()

    stats = _stats(redis_url)
    assert stats.committed == 2 * 16
    assert _is_conserved(stats)


def test_a_feeder_that_dies_of_a_defect_ends_the_learner_that_waits_for_its_tasks(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(feeder: Feeder) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Feeder, "feed", fail)
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    give_up = threading.Timer(20.0, ring.stopping.set)
    give_up.start()

    with pytest.raises(RuntimeError, match="a defect"):
        ring.live()
    give_up.cancel()


def test_a_learner_that_waits_while_no_actor_is_heard_counts_an_alarm(
    redis_url: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These actors answer, slowly, and no broker reports them."""
    settings = _settings(tmp_path, steps=1)
    impatient = settings.console.model_copy(update={"alarm_s": 0.01})
    settings = settings.model_copy(update={"console": impatient})
    answer = ActorThread._answer

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return answer(*arguments, **named)

    monkeypatch.setattr(ActorThread, "_answer", slowly)
    monkeypatch.setattr(rank_zero, "KEEPALIVE_S", 0.02)

    assert RingInProcess(settings, redis_url, ranks).live()

    [line] = _lines(settings.run.folder, "metrics.jsonl")
    assert line["sampling_alarms"] >= 1


def test_a_newer_learner_ends_this_one(redis_url: str, tmp_path: Path, ranks: Ranks) -> None:
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)

    def take_over(step: int) -> None:
        if step == 2:
            with Store(redis_url, "tiny") as store:
                store.run(operations.begin_lineage(1, 0))

    ring.shelf.on_publish = take_over

    with pytest.raises(LostLineage):
        ring.live()


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_wiped_store_beside_a_checkpoint_is_rebuilt(
    redis_url: str, tmp_path: Path, ranks: Ranks, deaths: int
) -> None:
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    for _ in range(deaths):  # all with the checkpoint of the first
        ring.shelf.end_life_at = 3
        with pytest.raises(LifeEnded):
            ring.live()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()

    assert ring.live()

    metrics = _lines(ring.settings.run.folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["lineage"] == deaths + 1, "a lineage that no actor has seen"
    stats = _stats(redis_url)
    assert stats.committed == 6 * 16, "two batches of the checkpoint, four of this life"
    assert _is_conserved(stats)


def test_other_settings_do_not_resume(redis_url: str, tmp_path: Path, ranks: Ranks) -> None:
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    ring.shelf.end_life_at = 3
    with pytest.raises(LifeEnded):
        ring.live()
    ring.settings = _settings(tmp_path, seed=1)

    with pytest.raises(CheckpointError, match="with the `run:` settings of now"):
        ring.live()


@pytest.mark.slow
def test_a_lost_checkpoint_resumes_from_the_one_before(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    ring.shelf.end_life_at = 5
    with pytest.raises(LifeEnded):
        ring.live()
    checkpoints = ring.settings.run.folder / "checkpoints"
    (checkpoints / "step-000004" / "tensors-0.safetensors").write_bytes(b"cut short")

    assert ring.live()

    metrics = _lines(ring.settings.run.folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert _is_conserved(_stats(redis_url))
    shutil.rmtree(checkpoints)


@pytest.mark.slow
def test_samples_hold_a_single_history_over_a_kill(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    samples = {"every": 1, "groups": 2}
    settings = _settings(tmp_path, eval_every=3, eval_episodes=2, samples=samples)
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 5

    with pytest.raises(LifeEnded):
        ring.live()
    assert ring.live()

    lines = list(read_samples(settings.run.folder))
    trained = [(line.step, line.task) for line in lines if line.kind == "train"]
    assert sorted({step for step, _ in trained}) == [1, 2, 3, 4, 5, 6]
    assert len(trained) == len(set(trained)) == 6 * 2 * 4
    evaluated = [line["step"] for line in _lines(settings.run.folder, "eval.jsonl")]
    assert evaluated[-1] == 6
    assert [line.step for line in lines if line.kind == "eval"] == [
        s for s in evaluated for _ in "ab"
    ]
    groups = {
        line["step"]: line["group_ids"] for line in _lines(settings.run.folder, "batches.jsonl")
    }
    assert all(line.group in groups[line.step] for line in lines if line.kind == "train")
    assert {line.lineage for line in lines} == {1, 2}
    assert all(line.tokens == 1 and line.text and line.parts.keys() == {"exact"} for line in lines)
