"""`nyala top`: the live view of a run, read from its folder and store or asked of its broker."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import structlog
import typer
from rich.console import Console

from broker.client import BrokerClient
from broker.protocol.messages import StatusReply
from broker.transport.keys import load_pair, load_public
from buffer.operations.values import ActorSeen
from buffer.sampling import closed_lines, groups_in_flight
from configs.errors import DeadlineError, SettingsError
from configs.loader import load
from configs.settings import Settings
from configs.worker import Worker
from console.display.display import IdleTime, PlainDisplay, make_display, print_line
from console.display.progress import (
    NewestSample,
    RunProgress,
    newest_stage,
    progress_of,
    stopped_line,
)
from console.display.result import print_result
from console.display.snapshot import GroupsInFlight, View
from console.run.actor_watch import ActorWatch, StoreLook
from console.run.run_folder import RunFolder, RunState, run_folder_of
from learner.reporting.run_snapshot import RunSnapshot

# --------------------------------------------------------------------------------------------------
# The parts of a snapshot that the store has: actors, the fill of the buffer, what is closed.


def with_store(view: View, look: StoreLook | None, settings: Settings) -> View:
    """Add what the store has shown; nothing where it did not answer."""
    if look is None:
        return view
    groups = groups_in_flight(look.stats, settings.run, settings.buffer)
    return replace(
        view,
        actors=look.actors,
        silent_after_s=settings.broker.heartbeat_timeout_s,
        fill=GroupsInFlight(
            **groups, memory=look.memory.share, batch=settings.run.groups_per_batch
        ),
        closed=tuple(closed_lines(look.closed, settings.run.folder)),
        hosts=look.stats.hosts if settings.run.has_agents else None,
    )


# --------------------------------------------------------------------------------------------------
# A run of this machine as its files and its store show it, whoever has started it.

LEARNER = "learner"
STOPPED_AFTER_S = 10.0  # a look at the store takes some, and `nyala up` may be about to begin


class LocalRun:
    """Reads a run's folder, and its store while one answers.

    Example:
        run = LocalRun(folder)
        display.show(run.read_view())
        run.close()
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._settings = load(folder.config)
        self.name = self._settings.run.name
        self._progress = RunProgress(folder, steps=self._settings.run.steps)
        self._sample = NewestSample(folder.samples)
        self._url = ""
        self._watch: ActorWatch | None = None
        self._up_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self._folder.state is RunState.FINISHED

    @property
    def has_looked(self) -> bool:
        """Whether the store has been read, if there is one."""
        return self._watch is None or self._watch.has_looked

    @property
    def has_stopped(self) -> bool:
        """Whether no process has kept the run up, and no store has answered, for a while."""
        now = time.monotonic()
        if self._folder.is_held or (self._watch is not None and self._watch.newest is not None):
            self._up_at = now
        return now - self._up_at >= STOPPED_AFTER_S

    def read_view(self) -> View:
        """Read all that is new, and describe the run."""
        progress, newest = self._progress.read_progress(), self._ask()
        logs = sorted(self._folder.log("*").parent.glob("*.log"))
        stages = {path.stem: stage for path in logs if (stage := newest_stage(path)) is not None}
        learner = stages.get(LEARNER)
        trained_at = self._progress.newest_at
        begun_at = learner.at if learner is not None else 0.0
        alarm = None
        is_away = newest is None and self.has_looked
        if is_away and not self._folder.is_held and not self.is_over:
            alarm = stopped_line(self._folder, steps=self._settings.run.steps)
        elif self._watch is not None and time.time() - max(trained_at, begun_at) >= self._alarm_s:
            alarm = self._watch.idle()
        view = View(
            progress,
            {name: stage.name for name, stage in stages.items()},
            None if self._watch is None else self._watch.alive,
            is_training=progress.step > 0 and trained_at >= begun_at,
            alarm=alarm,
            sample=self._sample.read_newest(),
        )
        return with_store(view, newest, self._settings)

    def close(self) -> None:
        """End the thread that reads the store."""
        if self._watch is not None:
            self._watch.close()

    @property
    def _alarm_s(self) -> float:
        return self._settings.console.alarm_s

    def _ask(self) -> StoreLook | None:
        """Return the newest reading of the store, whose address may change with each `nyala up`."""
        try:
            url = self._folder.read_redis_url()
        except (OSError, SettingsError):  # it has not been started yet, or belongs to another user
            return None
        if url != self._url:
            self.close()
            self._url, self._watch = url, ActorWatch(url, self._settings)
            self._watch.start()
        return None if self._watch is None else self._watch.newest


# --------------------------------------------------------------------------------------------------
# A run on other machines as its broker describes it to an observer: no files, no sampled text.

LOOK_EVERY_S = 1.0
FIRST_LOOK_S = 5.0  # a store of this machine answers within a tenth of a second
POLL_S = 0.05
DEADLINE_S = 10.0  # of one look; the next one begins at once
GIVEN_UP_AFTER_S = 600.0  # of silence: a broker that restarts, or its network, is back by then
ALARM_S = 60.0  # as `console.alarm_s`, which is on the other machine
ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a run at its broker: `tcp://HOST:PORT/RUN`."""

    endpoint: str
    run: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read the address of a run at its broker.

        Raises:
            SettingsError: The text is no such address.
        """
        parts = urlsplit(text)
        run = parts.path.strip("/")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "tcp" or not parts.hostname or port is None or not run or "/" in run:
            raise SettingsError(
                f"RUN must be the folder of a run, or tcp://HOST:PORT/NAME of its broker, got "
                f"{text}; the port is that of broker.endpoint, the name that of run.name"
            )
        return cls(f"tcp://{parts.netloc}", run)


class RemoteRun:
    """Asks a broker for the state of its run.

    A thread of its own asks, so that a broker that is away does not hold up the view.
    """

    def __init__(self, address: Address, key: Path) -> None:
        """Read the keys, and start the thread that asks the broker.

        Args:
            address: Address of the broker.
            key: The observer's secret key, with the broker's public key beside it as `broker.pub`.

        Raises:
            SettingsError: `key` is no such file, or a key is missing or readable by others.
        """
        if key.suffix != ".key":
            raise SettingsError(
                f"--key must be a file such as ana.key, whose name ends in .key, got {key}; name "
                "that, or make one with `nyala keys add ana --role observer --in RUN`, and copy "
                "broker.pub beside it"
            )
        self.name = address.run
        self._address = address
        self._keys = load_pair(key.parent, key.stem)
        self._server_key = load_public(key.parent, "broker")
        self._newest: tuple[StatusReply, float] | None = None
        self._began_at = time.monotonic()
        self._away = "nobody has answered yet"
        self._stop = threading.Event()
        self._worker = Worker(lambda: asyncio.run(self._ask()), name="observer")
        self._idle = IdleTime(ALARM_S)
        self._worker.start()

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self._newest is not None and self._newest[0].state == ENDED

    @property
    def has_looked(self) -> bool:
        """Whether its broker has answered."""
        return self._newest is not None

    @property
    def has_stopped(self) -> bool:
        """Whether its broker has not answered for a while."""
        heard_at = self._began_at if self._newest is None else self._newest[1]
        return time.monotonic() - heard_at >= GIVEN_UP_AFTER_S

    def read_view(self) -> View:
        """Describe the run as it was when the broker last answered.

        Raises:
            RefusedError: The broker refuses this key, or serves another run.
        """
        self._worker.raise_if_failed()
        if self._newest is None:
            stages = {self._address.endpoint: self._away}
            return View(progress_of(RunSnapshot(), steps=0), stages, None, is_training=False)
        reply, at = self._newest
        run_snapshot = (
            RunSnapshot.decode(reply.run_snapshot) if reply.run_snapshot else RunSnapshot()
        )
        progress = progress_of(run_snapshot, steps=reply.steps)
        seen = tuple(ActorSeen(a.incarnation, a.silent_s, a.fields) for a in reply.seen)
        silent_s = time.monotonic() - at
        alarm = self._idle.alarm(reply.idle or None, reply.version)
        if silent_s > DEADLINE_S:
            alarm = f"the broker has not answered for {silent_s:.0f} s: {self._away}"
        return View(
            progress,
            {"broker": f"the run is {reply.state}", "learner": "no batch yet"},
            sum(actor.is_present(reply.silent_after_s) for actor in seen),
            is_training=progress.step > 0,
            alarm=alarm,
            actors=seen,
            silent_after_s=reply.silent_after_s,
            fill=GroupsInFlight(**reply.groups, memory=reply.memory) if reply.groups else None,
            closed=reply.closed,
        )

    def close(self) -> None:
        """Have the thread end after its present look; does not wait for it."""
        self._stop.set()

    async def _ask(self) -> None:
        client = BrokerClient(
            self._address.endpoint,
            server_key=self._server_key,
            keys=self._keys,
            run=self._address.run,
            incarnation=f"observer-{secrets.token_hex(4)}",
        )
        try:
            while not self._stop.is_set():
                try:
                    self._newest = await client.status(deadline_s=DEADLINE_S), time.monotonic()
                except DeadlineError as error:
                    self._away = str(error)
                    continue
                await asyncio.to_thread(self._stop.wait, LOOK_EVERY_S)
        finally:
            await client.close()


# --------------------------------------------------------------------------------------------------
# `nyala top`: the live view of a run that was started elsewhere.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def top(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The folder of a run, or tcp://HOST:PORT/NAME of its broker."
        ),
    ],
    *,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With an address: an observer's key, broker.pub beside it.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live view.")
    ] = False,
) -> None:
    """Watch a run as `nyala up` shows it.

    The view lasts until the run has finished; Ctrl-C ends only the view. Lines (--plain, or no
    terminal) also end with a run that is stopped. A run on other machines is seen through its
    broker, with an observer's key.

    Example: `nyala top runs/demo`
    """
    console = Console()
    source, folder = _source(run, key)
    try:
        with _without_logs(), make_display(console, name=source.name, plain=plain) as display:
            if isinstance(display, PlainDisplay):
                _wait_for_a_look(source)
            display.show(source.read_view())
            while not source.is_over:
                if isinstance(display, PlainDisplay) and source.has_stopped:
                    return  # the last line says so, and without a terminal there is no Ctrl-C
                time.sleep(LOOK_EVERY_S)
                display.show(source.read_view())
    except KeyboardInterrupt:
        return
    finally:
        source.close()
    print_line(console, f"{source.name} has finished")
    if folder is not None:
        print_result(console, folder)


def _wait_for_a_look(source: LocalRun | RemoteRun) -> None:
    """Let lines begin with a whole look, where one comes soon: each line stays for good."""
    deadline = time.monotonic() + FIRST_LOOK_S
    source.read_view()  # begins to ask
    while not (source.has_looked or source.is_over) and time.monotonic() < deadline:
        time.sleep(POLL_S)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep lines of a log out of the view, which says the same."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        yield
    finally:
        structlog.configure(**before)


def _source(run: str, key: Path | None) -> tuple[LocalRun | RemoteRun, RunFolder | None]:
    """Open the run that a person names.

    Raises:
        SettingsError: There is no such run, or its address comes without a key.
    """
    if "://" not in run:
        if key is not None:
            raise SettingsError(
                f"--key must be given with tcp://HOST:PORT/NAME of a broker, got it with {run}; "
                f"leave it out for a run on this machine"
            )
        folder = run_folder_of(Path(run))
        return LocalRun(folder), folder
    address = Address.parse(run)
    if key is None:
        raise SettingsError(
            f"--key must be the file of an observer's key, got none with {run}; make one on the "
            f"run's machine with `nyala keys add ana --role observer --in RUN`, and copy "
            f"broker.pub beside it"
        )
    return RemoteRun(address, key), None
