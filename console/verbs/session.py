"""One session of `nyala up`, from the files of a run to the end of its last process.

`up.py` has checked settings and machine before. `Session` then does each step:

    prepare -> Redis -> model -> all other processes at once -> watch -> stop in order -> result

Waits for the learner to finish; Ctrl-C, SIGTERM, SIGHUP or a process that cannot be kept up
unblocks it. However it ends, no process is left.
"""

from __future__ import annotations

import time

from rich.console import Console

from configs.json_lines import read_rows
from configs.machine import full_disk
from configs.settings import Settings
from console.display.display import Display, IdleTime, make_display, print_line
from console.display.progress import NewestSample, Progress, RunProgress, Stages
from console.display.result import print_result
from console.display.snapshot import View
from console.live.stop import kept_of
from console.live.top import with_store
from console.report.model_card import write_card
from console.report.write import write_report
from console.run.actor_watch import ActorWatch
from console.run.init_model import make_if_needed
from console.run.plan import awaited_agents, commands, prepare, redis_command
from console.run.process import Forks, Process, Supervised
from console.run.process_guard import ProcessGuard
from console.run.redis_server import RedisServer, wait_until_ready
from console.run.run_folder import RunFolder, RunState, write_versions
from console.run.supervisor import (
    SETTINGS_ERROR,
    SUPERVISE_EVERY_S,
    RestartPolicy,
    RunOutcome,
    StopSignals,
    Supervisor,
    cause_of_end,
)

FAILED = 1
STOPPED = 130  # what shells give to Ctrl-C
IMPORTING = "importing libraries, in one process for all"
"""Stage of what begins as a fork, until it does."""


class Session:
    """Starts, watches and stops the processes of a run."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        console: Console,
        *,
        redis_url: str | None,
        resume_command: str,
        plain: bool = False,
        forks: Forks | None = None,
    ) -> None:
        self._console = console
        self._settings = settings
        self._folder = folder
        self._redis_url = redis_url
        self._resume_command = resume_command
        self._plain = plain
        self._forks = forks
        self._actors: ActorWatch | None = None
        self._signals = StopSignals()

    def run(self) -> int:
        """Start all processes, watch them, and stop them in order.

        Returns:
            The exit code: 0 if the run has finished, 130 after an interrupt, 2 if a person has to
            change something, else 1.

        Raises:
            NyalaError: Redis or the model that `init` stands for could not be started or made.
        """
        server = prepare(self._settings, self._folder, redis_url=self._redis_url)
        write_versions(self._folder.path)
        try:
            with self._signals:
                self._make_model()
                outcome = self._supervise(server)
        except KeyboardInterrupt:
            outcome = None
        has_report = any(read_rows(self._folder.metrics)) and not self._signals.times_urged
        if has_report:
            self._write_report()
        if outcome is not None and outcome.is_finished:
            self._write_card()
            print_result(self._console, self._folder)
            return 0
        if outcome is not None:
            self._say(f"stopped: {outcome.reason}")
        if has_report:
            self._say(f"the curves so far are in {self._folder.report}")
        self._say(kept_of(self._folder))
        self._say(f"to go on from {self._folder.newest_checkpoint() or 'the start'}:")
        self._say(f"  {self._resume_command}")
        if outcome is None:
            return STOPPED
        return SETTINGS_ERROR if outcome.code == SETTINGS_ERROR else FAILED

    def _write_report(self) -> None:
        try:
            write_report([self._folder.path])
        except Exception as error:  # noqa: BLE001 - a run does not fail for a page about it
            self._say(
                f"warning: {self._folder.report} could not be written: {error!r}; "
                f"try again with `nyala report {self._folder.path}`"
            )

    def _write_card(self) -> None:
        model = self._folder.model
        try:
            if model.is_dir():
                write_card(model, self._settings, self._settings.run.steps)
        except Exception as error:  # noqa: BLE001 - as of the report
            self._say(
                f"warning: the model card in {model} could not be written: {error!r}; `nyala push` "
                f"writes it before an upload"
            )

    def _make_model(self) -> None:
        if self._settings.run.model != "init":
            return
        try:
            make_if_needed(
                self._settings,
                self._folder.init,
                self._console,
                plain=self._plain,
                forks=self._forks,
            )
        except KeyboardInterrupt:
            self._say(
                "the supervised start was not over: the model is made anew by the next start; "
                "`nyala init-model` makes it ahead of the run"
            )
            raise

    def _supervise(self, server: RedisServer | None) -> RunOutcome:
        """Start all processes and watch them; all have ended when this returns or raises."""
        guard = ProcessGuard(grace_s=self._settings.console.stop_timeout_s)
        try:
            processes = [
                Process(command, guard, self._forks)
                for command in commands(self._settings, self._folder)
            ]
            stages = Stages({p.name: self._folder.log(p.name) for p in processes})
            if server is not None:
                redis = redis_command(server, self._folder, self._settings)
                processes.insert(0, Process(redis, guard))
            display = make_display(self._console, name=self._settings.run.name, plain=self._plain)
            supervisor = Supervisor(
                processes,
                RestartPolicy(
                    self._settings.console.max_restarts,
                    exit_when_told=self._settings.actors.exit_when_told,
                ),
                is_finished=lambda: self._folder.state is RunState.FINISHED,
                log=display.log,
                last_error=lambda name: cause_of_end(stages.take_error(name), self._folder.path),
                on_death=self._report_death,
            )
            with display:
                return self._watch(supervisor, processes[0], server, display, stages)
        finally:
            guard.close()

    def _watch(
        self,
        supervisor: Supervisor,
        first: Process,
        server: RedisServer | None,
        display: Display,
        stages: Stages,
    ) -> RunOutcome:
        """Start Redis, then the rest at once; stop all of it in order, whatever happens."""
        url = self._folder.redis_url.read_text(encoding="utf-8").strip()
        self._actors = actors = ActorWatch(url, self._settings)
        try:
            if server is not None:
                steps = self._settings.run.steps
                display.show(View(Progress(0, steps), {"redis": "starting"}, 0, is_training=False))
                first.start()
                wait_until_ready(server.url, has_ended=lambda: first.poll() is not None)
            supervisor.start()
            actors.start()
            if (awaited := awaited_agents(self._settings)) is not None:
                display.log(awaited)
            outcome = self._look_until_the_end(supervisor, display, stages)
            if not outcome.is_finished:
                display.log(f"{outcome.name}: {outcome.error or 'ended without a word'}")
                display.log(f"its log is {self._folder.log(outcome.name)}")
            return outcome
        finally:
            actors.close()
            self._stop(supervisor, display)

    def _report_death(self, process: Supervised) -> None:
        """Release the leases of an actor or teacher that has ended: others take over at once."""
        is_holder = process.role in {"actor", "teacher"}
        if is_holder and process.pid is not None and self._actors is not None:
            self._actors.report_death(process.pid)

    def _num_alive(self, supervisor: Supervisor, display: Display) -> int:
        """Count live actors by the store, or those of this machine if the store is away."""
        if self._actors is not None:
            try:
                self._actors.check_watch_thread()
            except Exception as error:  # noqa: BLE001 - no run stops for a count, whatever ended it
                display.log(
                    f"actors are no longer watched: {error!r}; only those of this machine are "
                    f"counted, and the leases of one that dies expire"
                )
                self._actors = None
        alive = self._actors.alive if self._actors is not None else None
        return supervisor.running("actor") if alive is None else alive

    def _why_idle(self, supervisor: Supervisor) -> str | None:
        if self._actors is None:
            return None
        return self._actors.idle(num_processes=supervisor.running("actor"))

    def _look_until_the_end(
        self, supervisor: Supervisor, display: Display, stages: Stages
    ) -> RunOutcome:
        progress = RunProgress(self._folder, steps=self._settings.run.steps)
        samples = NewestSample(self._folder.samples)
        resumed_at = progress.read_progress().step
        idle = IdleTime(self._settings.console.alarm_s)
        show_at, is_full = 0.0, False
        while True:
            outcome = supervisor.tick()
            if time.monotonic() >= show_at or outcome is not None:
                # Redis takes no sign of life on a full disk: that is no death.
                full = full_disk(self._folder.path)
                watched = self._actors if full is None else None
                alive = (
                    supervisor.running("actor")
                    if watched is None
                    else self._num_alive(supervisor, display)
                )
                now = progress.read_progress()
                # A learner that was killed first takes back the steps after its checkpoint.
                resumed_at = min(resumed_at, now.step)
                alarm = idle.alarm(self._why_idle(supervisor), now.step)
                if full is not None and not is_full:  # before anything dies of it, or waits
                    display.log(full)
                is_full = full is not None
                is_training = now.step > resumed_at
                if is_training:
                    for line in stages.report():
                        display.log(line)
                view = View(
                    now,
                    {**stages.read_stages(), **dict.fromkeys(supervisor.waiting(), IMPORTING)},
                    alive,
                    is_training,
                    alarm,
                    elapsed_s=stages.elapsed_s,
                    sample=samples.read_newest(),
                )
                newest = None if watched is None else watched.newest
                display.show(with_store(view, newest, self._settings))
                show_at = time.monotonic() + self._settings.console.refresh_s
            if outcome is not None:
                return outcome
            time.sleep(SUPERVISE_EVERY_S)

    def _stop(self, supervisor: Supervisor, display: Display) -> None:
        """Stop in order, even where no output is possible any more; Ctrl-C hurries it."""
        killed: list[str] = []
        try:
            display.log("stopping: actors drain and the learner saves, then broker and Redis")
        finally:
            killed = supervisor.stop(
                timeout_s=self._settings.console.stop_timeout_s,
                times_urged=lambda: self._signals.times_urged,
            )
        if self._signals.times_urged:
            display.log("stopped in haste")
        elif killed:
            display.log(f"had to be killed: {', '.join(killed)}")

    def _say(self, text: str) -> None:
        print_line(self._console, text)
