"""`nyala buffer`: views of the replay buffer, decisions about dead letters, the end of a pause.

Owns the verbs, their help and the queries of the store; `tables.py` shows the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import structs
from rich.console import Console

from broker.protocol.codec import decode_spec
from buffer import operations
from buffer.operations.values import DeadLetter
from buffer.record.codec import decode_completion, decode_episode, join_completions
from buffer.record.episode import Completion, Episode
from buffer.record.object_store import is_reference
from buffer.store import Store
from configs.errors import RecordError, SettingsError
from configs.loader import load
from configs.secrets import redis_url
from configs.settings import Settings
from console.command_line import AsJson, Run
from console.display.display import print_line
from console.display.progress import naming_a_stop
from console.run.run_folder import run_folder_of, settings_of
from console.samples.command import print_json_lines, print_samples
from learner.reporting.samples import Origin, SampleLine, sample_line

from .tables import ResultTable, print_facts

# --------------------------------------------------------------------------------------------------
# Queries of `nyala buffer` to the store of a run, answered as plain rows.

PAGE = 500  # dead letters of one call


@contextmanager
def open_buffer(path: Path) -> Iterator[BufferOfRun]:
    """Connect to the store of a run; what is written there carries no lineage.

    Raises:
        NyalaError: There is no such run, it is stopped, or its Redis does not answer.
    """
    folder = run_folder_of(path)
    settings = load(folder.config)
    with ExitStack() as stack:
        with naming_a_stop(folder, settings):
            url = redis_url(settings.run, settings.buffer)
            store = stack.enter_context(Store(url, run=settings.run.name))
            store.ping()
        yield BufferOfRun(store)


class BufferOfRun:
    """Queries of one run's store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def counts(self) -> ResultTable:
        """Count tasks by place, and memory."""
        stats, memory = self._store.run(operations.stats()), self._store.run(operations.memory())
        rows: list[dict[str, Any]] = [
            {"place": name, "tasks": getattr(stats, name)}
            for name in ("ready", "leased", "buffered", "claimed", "committed", "cancelled", "dead")
        ]
        rows += [
            {"place": f"dropped: {why}", "tasks": count} for why, count in stats.dropped.items()
        ]
        lost = stats.created - stats.accounted
        if lost:
            rows.append({"place": "lost", "tasks": lost})
        kept = stats.kept_units + stats.reused_units
        reuse = f"; {kept} groups kept for reuse, {stats.reused_units} in a batch" if kept else ""
        return ResultTable(
            f"{stats.state}, lineage {stats.lineage}, {stats.version} batches trained, "
            f"{stats.committed_step} committed; {stats.created} tasks created; "
            f"{memory.used_bytes / 2**20:.1f} MiB used ({memory.share:.0%} of the limit){reuse}",
            rows,
            {**asdict(stats), "memory": memory._asdict()},
        )

    def waiting(self, n: int) -> ResultTable:
        """List the oldest complete units, with figures of their records."""
        rows = []
        for unit in self._store.run(operations.peek(n)):
            records = self._store.run(operations.records(unit.task_ids))
            episodes = _readable(records)
            rows.append(
                {
                    "group": unit.group_id,
                    "episodes": len(unit.task_ids),
                    "bytes": unit.num_bytes,
                    "tokens": [episode.completion.token_ids.size for episode in episodes],
                    "rewards": [round(episode.reward, 4) for episode in episodes],
                    "policy versions": sorted(
                        {
                            f"{span.version.lineage}.{span.version.step}"
                            for episode in episodes
                            for span in episode.completion.versions
                        }
                    ),
                }
            )
        return ResultTable(f"{len(rows)} complete units wait, the oldest first", rows)

    def texts(self, n: int, settings: Settings) -> list[SampleLine]:
        """Return all episodes of the oldest `n` complete units as text; no step has trained them.

        A record that cannot be read is left out.

        Raises:
            SettingsError: The run's tokenizer cannot be loaded.
        """
        from actors.engine.tokenizer import ModelTokenizer  # noqa: PLC0415 - transformers

        run = settings.run
        decode, names, mixture = (
            ModelTokenizer.for_run(run).decode,
            list(run.by_environment),
            run.mixture,
        )
        lines = []
        for unit in self._store.run(operations.peek(n)):
            records = self._store.run(operations.records(unit.task_ids))
            environment = names[mixture.training(unit.group_id).environment]
            origin = Origin(-1, -1, environment)
            lines += [sample_line(origin, record, decode) for record in _readable(records)]
        return lines

    def resume(self) -> ResultTable:
        """Let all leases be granted again, and list what had been closed."""
        closed = self._store.run(operations.closed())
        self._store.run(operations.resume())
        rows = [{"what": "all leases", "was closed for": closed.paused}] if closed.paused else []
        rows += [
            {"what": f"key {tag}", "was closed for": key.why} for tag, key in closed.keys.items()
        ]
        return ResultTable("leasing resumed" if rows else "nothing was closed", rows)

    def dead(self, offset: int, n: int) -> ResultTable:
        """List one page of dead letters."""
        letters = self._store.run(operations.dead_letters(offset, n))
        stats = self._store.run(operations.stats())
        title = f"{stats.dead - stats.purged} dead letters, {stats.purged} more were purged"
        return ResultTable(title, [_letter_fields(letter) for letter in letters])

    def dead_task(self, task_id: int) -> ResultTable:
        """Return all that a dead letter keeps.

        Raises:
            SettingsError: The task is no dead letter.
        """
        dead = self._store.run(operations.dead_letter(task_id))
        if dead is None:
            raise SettingsError(
                f"task must be a dead letter, got {task_id}; choose one that `nyala buffer dead "
                f"list` names"
            )
        facts = _letter_fields(dead.letter) | {"last holder": dead.incarnation}
        facts |= {f"spec {name}": value for name, value in _spec_fields(dead.spec).items()}
        facts |= _completion(dead.chunks)
        facts |= _record_fields(dead.record)
        rows = [{"of": name, "is": value} for name, value in facts.items() if name != "token_ids"]
        return ResultTable(f"dead letter {task_id}", rows, facts)

    def requeue(self, task_ids: Sequence[int], *, every: bool) -> ResultTable:
        """Put dead letters back among the tasks that wait; each has a verdict.

        Raises:
            SettingsError: Both ids and `every` are given, or neither.
        """
        ids = self._chosen(task_ids, every=every)
        return _verdicts("requeued", ids, self._store.run(operations.requeue_dead(ids)))

    def purge(self, task_ids: Sequence[int], *, every: bool) -> ResultTable:
        """Delete dead letters for good; raises as `requeue`."""
        ids = self._chosen(task_ids, every=every)
        return _verdicts("purged", ids, self._store.run(operations.purge_dead(ids)))

    def _chosen(self, task_ids: Sequence[int], *, every: bool) -> list[int]:
        if bool(task_ids) == every:
            raise SettingsError(
                f"dead letters must be named by their ids or by --all, got "
                f"{'both' if every else 'neither'}; give one of the two (`nyala buffer dead list` "
                f"shows the ids)"
            )
        if not every:
            return list(task_ids)
        ids: list[int] = []
        while page := self._store.run(operations.dead_letters(len(ids), PAGE)):
            ids += [letter.task_id for letter in page]
        return ids


def _readable(records: Sequence[bytes | None]) -> list[Episode]:
    """Decode the readable records: one may be bad, or have been committed meanwhile."""
    episodes = []
    for record in records:
        with suppress(RecordError):
            episodes += [decode_episode(record)] if record is not None else []
    return episodes


def _letter_fields(letter: DeadLetter) -> dict[str, Any]:
    died_at = datetime.fromtimestamp(letter.died_at_ms / 1000, UTC)
    return {
        "task": letter.task_id,
        "why": letter.why,
        "died": died_at.isoformat(timespec="seconds"),
        "failures": letter.attempts,
        "tokens": letter.length,
    }


def _spec_fields(spec: bytes) -> dict[str, Any]:
    try:
        return structs.asdict(decode_spec(spec))
    except RecordError as error:
        return {"unreadable": str(error)}


def _completion(chunks: Sequence[bytes]) -> dict[str, Any]:
    """Describe the unfinished completion, which may itself have caused the failures."""
    if not chunks:
        return {}
    try:
        completion: Completion = join_completions([decode_completion(chunk) for chunk in chunks])
    except RecordError as error:
        return {"unfinished completion": f"unreadable: {error}"}
    return _token_fields(completion)


def _token_fields(completion: Completion) -> dict[str, Any]:
    branches = [tuple(branch) for branch in completion.branches]
    return {
        **({"branches": branches} if branches else {}),
        "token_ids": completion.token_ids.tolist(),
    }


def _record_fields(record: bytes | None) -> dict[str, Any]:
    if record is None:
        return {}
    if is_reference(record):
        return {"record": f"in buffer.object_store: {record[1:].decode()}"}
    try:
        episode = decode_episode(record)
    except RecordError as error:
        return {"record": f"unreadable: {error}"}
    return {
        "reward": episode.reward,
        "finish reason": episode.finish_reason,
        "prompt tokens": episode.prompt_ids.size,
        "completion tokens": episode.completion.token_ids.size,
        **_token_fields(episode.completion),
        **{f"metadata {name}": value for name, value in episode.metadata.items()},
    }


def _verdicts(what: str, ids: Sequence[int], verdicts: Sequence[str]) -> ResultTable:
    rows = [{"task": i, "verdict": verdict} for i, verdict in zip(ids, verdicts, strict=True)]
    refused = ("GONE", "TRAINED", "ENDED", "FORGOTTEN")
    return ResultTable(f"{sum(v not in refused for v in verdicts)} of {len(ids)} {what}", rows)


# --------------------------------------------------------------------------------------------------
# `nyala buffer`: views of the replay buffer, and decisions about dead letters.

Tasks = Annotated[
    list[int] | None,
    typer.Argument(metavar="TASK...", help="Ids of dead letters.", show_default=False),
]
Count = Annotated[int, typer.Option("-n", min=1, max=1000, help="Most rows.")]
Every = Annotated[bool, typer.Option("--all", help="All dead letters of the run.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Look into the replay buffer of a run.\n\n"
    "Every task is in one place: ready, leased by an actor, buffered (finished), claimed by a "
    "batch, committed (inside a checkpoint), dropped, dead or cancelled.\n\n"
    "Example: `nyala buffer stats runs/demo`, then `nyala buffer dead list runs/demo`",
)
dead = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Decide about dead letters.\n\n"
    "A task dies after broker.max_attempts attempts without progress, or after "
    "broker.max_data_failures failures of its own (reward, environment); a batch that keeps "
    "killing the learner dies as a whole. It keeps its reason, its tokens and, if it was finished, "
    "its record. List, show, mend the cause; then requeue, or purge what is hopeless.",
)
app.add_typer(dead, name="dead")


@app.command()
def stats(run: Run, as_json: AsJson = False) -> None:
    """Count the tasks of a run by where they are.

    All counts come from the sets that hold the tasks; created is their sum, or a task was lost.

    Example: `nyala buffer stats runs/demo`
    """
    _show(run, as_json, lambda buffer: buffer.counts())


@app.command()
def peek(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, max=1000, help="Most units.")] = 10,
    texts: Annotated[
        bool, typer.Option("--texts", help="Show all episodes of these units as text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show finished units that wait for a batch, the oldest first.

    Nothing is taken: the next batch claims them in this order. Rewards are as the actors gave them,
    before weights and punishments of `rewards`. With --texts, --json prints JSON lines.

    Example: `nyala buffer peek runs/demo -n 1 --texts`
    """
    if not texts:
        _show(run, as_json, lambda buffer: buffer.waiting(n))
        return
    with open_buffer(run) as buffer:
        lines = buffer.texts(n, settings_of(run_folder_of(run).path))
    if as_json:
        print_json_lines(lines)
        return
    console = Console()
    print_line(console, f"{len(lines)} episodes of the oldest units that wait for a batch")
    print_samples(console, lines, full=False, title=_waiting)


@app.command()
def resume(run: Run, as_json: AsJson = False) -> None:
    """Lease tasks again: to all after a pause, and to suspended keys.

    Leasing pauses when more than 10 of the last 1,000 tasks died; `nyala status` shows why, and
    `nyala buffer dead list` which. Mend the cause first.

    Example: `nyala buffer resume runs/demo`
    """
    _show(run, as_json, lambda buffer: buffer.resume())


@dead.command("list")
def list_dead(
    run: Run,
    n: Count = 50,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Skip so many.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List dead letters with their reasons, the oldest first.

    Example: `nyala buffer dead list runs/demo`
    """
    _show(run, as_json, lambda buffer: buffer.dead(offset, n))


@dead.command()
def show(
    run: Run,
    task: Annotated[int, typer.Argument(metavar="TASK", help="Id of a dead letter.")],
    as_json: AsJson = False,
) -> None:
    """Show all that a dead letter keeps.

    With --json also the ids of its tokens, to try the same text again.

    Example: `nyala buffer dead show runs/demo 4711`
    """
    _show(run, as_json, lambda buffer: buffer.dead_task(task))


@dead.command()
def requeue(run: Run, tasks: Tasks = None, every: Every = False, as_json: AsJson = False) -> None:
    """Try dead letters again.

    READY: goes on from its tokens, its unit waits for it. ANEW: its unit had ended, so all of it is
    made again. TRAINED: too late, its unit is in a batch without it. ENDED: the run is over. GONE:
    no dead letter. FORGOTTEN: Redis has lost its prompt.

    Example: `nyala buffer dead requeue runs/demo 4711 4712`
    """
    _show(run, as_json, lambda buffer: buffer.requeue(tasks or (), every=every))


@dead.command()
def purge(run: Run, tasks: Tasks = None, every: Every = False, as_json: AsJson = False) -> None:
    """Delete dead letters for good, to free their memory.

    They still count as dead, so that no task goes missing.

    Example: `nyala buffer dead purge runs/demo --all`
    """
    _show(run, as_json, lambda buffer: buffer.purge(tasks or (), every=every))


def _waiting(line: SampleLine) -> str:
    return f"group {line.group} waits, task {line.task}, reward {line.reward:.3g}, {line.finish}"


def _show(run: Path, as_json: bool, ask: Callable[[BufferOfRun], ResultTable]) -> None:
    """Ask the store of a run and print its answer."""
    with open_buffer(run) as buffer:
        facts = ask(buffer)
    print_facts(facts, as_json=as_json)
