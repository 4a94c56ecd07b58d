"""`nyala status`: one look at a run, at its folder and, if it answers, its store."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from buffer.operations import actors, closed, memory, stats
from buffer.operations.run import brokers
from buffer.operations.values import LEFT, ActorSeen, LeasingPauses, RedisMemory, Stats
from buffer.sampling import closed_lines, hosts_line
from buffer.store import Store
from configs.errors import NyalaError, printable
from configs.json_lines import number, read_rows
from configs.loader import load
from configs.settings import Settings
from console.command_line import AsJson, Run
from console.display.display import print_line
from console.display.progress import Progress, RunProgress, stopped_line
from console.display.result import print_result
from console.display.snapshot import (
    GONE_SHOWN_S,
    View,
    duration,
    end_of,
    figures,
)
from console.run.actor_watch import idle_reason
from console.run.run_folder import RunFolder, RunState, run_folder_of

CURVES = {"rewards", "score_curve"}  # of the live view; the run's files have every batch

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """Show how far a run is.

    Also where its tasks are, and which actors sample; of a run that is stopped, since when. With
    --json all of it as one object, whose `store` is null where Redis does not answer.

    Example: `nyala status runs/demo`
    """
    if as_json:
        sys.stdout.write(json.dumps(status_of(run), indent=2) + "\n")
        return
    print_status(run, Console())


def status_of(path: Path) -> dict[str, Any]:
    """Describe a run for programs; `store` is None where Redis does not answer.

    Raises:
        NyalaError: There is no such run.
    """
    folder = run_folder_of(path)
    settings = load(folder.config)
    progress = RunProgress(folder, steps=settings.run.steps).read_progress()
    store = None
    with suppress(NyalaError, OSError):
        url = folder.read_redis_url()
        counts, seen, serving, shut, used = _ask_store(url, settings.run.name)
        store = {
            "tasks": asdict(counts),
            "memory": used._asdict(),
            "actors": [actor._asdict() for actor in seen],
            "brokers": serving,
            "paused": shut.paused,
            "suspended_keys": {tag: key._asdict() for tag, key in shut.keys.items()},
        }
    return {
        "run": settings.run.name,
        "state": folder.state,
        "is_up": folder.is_held,
        "stopped_at": folder.last_sign_at if folder.is_stopped and store is None else None,
        "checkpoint": folder.newest_checkpoint(),
        "progress": {k: v for k, v in asdict(progress).items() if k not in CURVES},
        "summary": folder.read_summary() if folder.state is RunState.FINISHED else None,
        "metrics": folder.metrics_pages(),
        "store": store,
    }


def print_status(path: Path, console: Console) -> None:
    """Print how far a run is, where its tasks are, and which actors sample.

    Raises:
        NyalaError: There is no such run.
    """
    folder = run_folder_of(path)
    settings = load(folder.config)
    if folder.state is RunState.FINISHED:
        console.print(f"{settings.run.name} has finished")
        print_result(console, folder)
        return
    progress = RunProgress(folder, steps=settings.run.steps).read_progress()
    console.print(
        f"{settings.run.name}: batch {progress.step} of {settings.run.steps}, newest checkpoint "
        f"{folder.newest_checkpoint() or '-'}",
        highlight=False,
    )
    for text in progress.advice.values():
        print_line(console, printable(f"ADVICE {text}"))
    try:
        url = folder.read_redis_url()
        counts, seen, serving, shut, used = _ask_store(url, settings.run.name)
    except (NyalaError, OSError) as error:
        print_line(console, _state_without_store(folder, settings, error))
        return
    limit_s = settings.broker.heartbeat_timeout_s
    alive = sum(actor.samples(limit_s) for actor in seen)
    values = figures(View(progress, {}, alive))
    idle = idle_reason(settings, counts, seen, used, shut)
    waited_s = time.time() - _fed_at(folder)
    shut_lines = closed_lines(shut, settings.run.folder)
    if idle is not None and waited_s >= settings.console.alarm_s:
        print_line(console, f"ALARM for {duration(waited_s)}: {idle}")
        shut_lines = [line for line in shut_lines if line != idle]
    line = ", ".join(f"{label} {value}" for label, value in values.items())
    lines = [line, *_wanted_lines(progress, alive), _tasks_line(counts), *shut_lines]
    if (waiting := hosts_line(counts, settings.run.folder)) not in {None, idle}:
        lines.append(str(waiting))
    if settings.algorithm.teacher_processes:
        lines.append(_teachers_line(settings, counts, seen))
    if counts.hosts:
        lines.append(f"hosts of agents: {counts.hosts}, with {counts.hosted} conversations")
    lines += [_quota_line(settings, used, alive)]
    lines += [_broker_line(endpoint, numbers) for endpoint, numbers in sorted(serving.items())]
    lines += _actor_lines(seen, limit_s)
    lines += [f"metrics of {name}: {url}" for name, url in folder.metrics_pages().items()]
    for text in lines:
        print_line(console, printable(text))


def _state_without_store(folder: RunFolder, settings: Settings, error: Exception) -> str:
    """Write how a run stands when its store does not answer."""
    if folder.state is RunState.UNFINISHED and not folder.is_held:
        line = stopped_line(folder, steps=settings.run.steps)
        # A store of its own ended with the run; another should answer still.
        return line if folder.is_stopped else f"{line} ({error})"
    if settings.run.model == "init" and not folder.init.exists():
        return "starting: the model that it begins with is being made"
    return f"starting or stopping: its store does not answer ({error})"


def _ask_store(
    url: str, run: str
) -> tuple[Stats, list[ActorSeen], dict[str, dict[str, float]], LeasingPauses, RedisMemory]:
    with Store(url, run=run) as store:
        ask = store.run
        used = ask(memory(of_run=True))
        return ask(stats()), ask(actors()), ask(brokers()), ask(closed()), used


def _wanted_lines(progress: Progress, alive: int) -> list[str]:
    if progress.actors_wanted is None:
        return []
    return [f"{progress.actors_wanted_why}: {progress.actors_wanted} wanted, {alive} there"]


def _teachers_line(settings: Settings, counts: Stats, seen: list[ActorSeen]) -> str:
    """Write how many processes each teacher has, and how many episodes wait for it."""
    limit_s = settings.broker.heartbeat_timeout_s
    alive = Counter(actor.teacher for actor in seen if actor.is_present(limit_s))
    return "teachers: " + "; ".join(
        f"{name} {alive[name]}, with {counts.unscored.get(name, 0)} episodes waiting"
        for name in settings.algorithm.teacher_processes
    )


def _quota_line(settings: Settings, used: RedisMemory, alive: int) -> str:
    """Write what the run uses of its quota."""
    most = settings.buffer.max_run_bytes
    limit = "" if most is None else f" of {most / 2**20:.1f}"
    return (
        f"quota: {used.run_bytes / 2**20:.1f}{limit} MiB in Redis, "
        f"{alive} of {settings.broker.max_actors} actors"
    )


def _fed_at(folder: RunFolder) -> float:
    """Return when the learner last got a batch, or the run began; Unix time."""
    rows = read_rows(folder.metrics)
    return number(rows[-1], "time") if rows else folder.config.stat().st_mtime


def _tasks_line(stats: Stats) -> str:
    states = ", ".join(f"{count} {label}" for label, count in stats.by_state.items() if count)
    return f"{stats.created} tasks created" + (f": {states}" if states else "")


def _broker_line(endpoint: str, figures: Mapping[str, float]) -> str:
    """Write the age of a broker's last sign of life, the number of its actors, and its refusals."""
    refused = {
        name.removeprefix("refused_"): int(count)
        for name, count in sorted(figures.items())
        if name.startswith("refused_")
    }
    silent_s = max(0.0, time.time() - figures.get("at", 0.0))
    first = f"broker {endpoint}, heard of {duration(silent_s)} ago"
    counts = ", ".join(f"{count} {code}" for code, count in refused.items())
    suspect = int(figures.get("suspect", 0))
    served = f"{int(figures.get('actors', 0))} actors"
    if suspect:
        served += f" ({suspect} of them silent for too long to get work)"
    return ", ".join([first, served, *([f"refused: {counts}"] if counts else [])])


def _actor_lines(seen: list[ActorSeen], limit_s: float) -> list[str]:
    """Write the live actors, and those that ended lately; the others are counted."""
    present = [actor for actor in seen if actor.is_present(limit_s)]
    gone = [actor for actor in seen if not actor.is_present(limit_s)]
    recent = [actor for actor in gone if actor.silent_s <= GONE_SHOWN_S]
    lines = [_actor_line(actor) for actor in present]
    lines += [f"{_actor_line(actor)}: {end_of(actor)}" for actor in recent]
    ends = Counter(map(end_of, gone))
    counts = ", ".join(f"{count} {how}" for how, count in sorted(ends.items()))
    return lines + (
        [f"actors that ended within the hour: {counts}"] if len(recent) < len(gone) else []
    )


def _actor_line(actor: ActorSeen) -> str:
    """Write the age of an actor's last sign of life, its host, and its figures other than zero."""
    fields = {name: value for name, value in actor.fields.items() if name != LEFT}
    host, version = fields.pop("host", "?"), fields.pop("version", "none yet")
    memory = fields.pop("memory_bytes", "0")
    if memory.replace(".", "", 1).isdecimal() and float(memory):
        fields["memory_gib"] = str(float(memory) / 2**30)
    numbers = [
        f"{name} {_rounded(value)}" for name, value in fields.items() if value not in {"0", "0.0"}
    ]
    first = f"{actor.incarnation} on {host}, heard of {duration(actor.silent_s)} ago"
    return ", ".join([first, f"version {version}", *sorted(numbers)])


def _rounded(value: str) -> str:
    """Write a figure of an actor with three digits; whole numbers and texts stay as they are."""
    try:
        figure = float(value)
    except ValueError:
        return value
    if figure.is_integer() or not math.isfinite(figure):
        return value
    return f"{figure:.3g}" if abs(figure) < 1000 else f"{figure:.0f}"
