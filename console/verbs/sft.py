"""`nyala sft`: supervised training of a run's model on demonstrations.

    check -> `init` model -> export of demonstrations -> learner, kept up -> model, report

The run has a folder as any other: settings, figures, checkpoints, model. There is no store, and no
actor but the one that exports. The same command again goes on from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from configs.errors import SettingsError
from configs.json_lines import JsonLinesFollower, Row, number, read_rows
from configs.loader import load, save
from configs.machine import visible_gpus
from configs.settings import Settings
from console.command_line import Config, ConfigOption, Overrides, one_of, program
from console.display.display import PLAIN_EVERY_S, print_line
from console.display.progress import Stages
from console.display.result import print_result
from console.report.write import write_report
from console.run.checks.check import CheckWarning
from console.run.checks.machine import check_devices
from console.run.checks.model import check_model, check_parallel, check_rate
from console.run.init_model import NUM_PAIRS, make_if_needed, progress_in, role_verb, run_to_end
from console.run.plan import environment_of, learner_gpus
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from console.run.run_folder import (
    RunFolder,
    RunState,
    refuse_changes,
    settings_of,
    write_versions,
)
from console.run.supervisor import (
    SETTINGS_ERROR,
    SUPERVISE_EVERY_S,
    RestartPolicy,
    RunOutcome,
    StopSignals,
    Supervisor,
    cause_of_end,
)
from console.run.user_files import resolve, resolve_as_begun, with_value

FAILED = 1
STOPPED = 130  # what shells give to Ctrl-C
SHOWN = (
    ("sft_loss", "loss", ".4f"),
    ("sft_held_out_loss", "held out", ".4f"),
    ("trained_tokens_per_s", "trained tokens/s", ",.0f"),
)
"""Figures of a line of `metrics.jsonl` that are shown, with their labels."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def sft(
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    *,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Archive an earlier run of this name and begin anew.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live display.")
    ] = False,
) -> None:
    """Train the model of a run on demonstrations, before it is rewarded.

    `sft.data` names rows with `messages`, of which the assistant's turns are trained, or with
    `prompt` and `completion`. Without it the model imitates the demonstrations of the run's
    environment. Rate, schedule, adapters, memory and ranks are those of `learner`: set learner.lr.

    The trained model is then in the run's folder. Train it further by reward as another run:
    `nyala up mine.yaml --set run.name=rewarded --set run.model=runs/taught/model`. The report of
    that run shows both curves. The same command again goes on from the newest checkpoint.

    Example: `nyala sft mine.yaml --set run.name=taught --set sft.data=solutions.jsonl`
    """
    path = one_of(config, config_option)
    raise typer.Exit(start(path, overrides or [], Console(), fresh=fresh, plain=plain))


def start(
    config: Path, overrides: Sequence[str], console: Console, *, fresh: bool, plain: bool
) -> int:
    """Start or resume supervised training, stay with it to its end, and return the exit code.

    Raises:
        NyalaError: The run cannot be started.
    """
    typed = settings_of(config, overrides)
    settings = resolve(typed)
    folder = RunFolder(settings.run.folder)
    with folder.locked():
        if fresh and folder.path.exists():
            archived = folder.archive()
            console.print(f"the earlier run is now in {archived}", highlight=False, soft_wrap=True)
        if folder.state is not RunState.NEW:
            settings = _as_begun(typed, folder)
        if folder.state is RunState.FINISHED:
            print_line(console, f"{settings.run.name} has finished; --fresh begins it anew")
            print_result(console, folder)
            return 0
        _check(settings, console)
        flags = [text for override in overrides for text in ("--set", override)]
        resume = shlex.join([program(), "sft", str(config), *flags])
        return SupervisedSession(
            settings, folder, console, resume_command=resume, plain=plain
        ).run()


def _as_begun(typed: Settings, folder: RunFolder) -> Settings:
    """Return the settings with which supervised training goes on.

    Raises:
        SettingsError: The run is no supervised training, or was begun with other settings.
    """
    begun = load(folder.config)
    if not folder.demonstrations.exists():
        raise SettingsError(
            f"run.name must be of another run for supervised training, got {begun.run.name}, a run "
            f"of `nyala up` in {folder.path}; choose another name with --set run.name=NAME"
        )
    settings = with_value(resolve_as_begun(typed, begun), "run", "steps", begun.run.steps)
    refuse_changes(folder, settings)
    return settings


def _check(settings: Settings, console: Console) -> None:
    """Refuse settings with which the learner could not train; print what is doubtful."""
    check_devices(settings.learner)
    check_parallel(settings)
    check_model(settings.run)
    rate = check_rate(settings)
    if isinstance(rate, CheckWarning):
        print_line(console, f"warning: {rate.text}")


class SupervisedSession:
    """Starts, watches and stops the processes of supervised training."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        console: Console,
        *,
        resume_command: str,
        plain: bool,
    ) -> None:
        self._settings, self._folder, self._console = settings, folder, console
        self._resume_command, self._plain = resume_command, plain
        self._signals = StopSignals()

    def run(self) -> int:
        """Make what is missing, train, and return the exit code.

        Raises:
            NyalaError: The model or the demonstrations could not be made.
        """
        self._folder.path.mkdir(parents=True, exist_ok=True)
        write_versions(self._folder.path)
        outcome: RunOutcome | None = None
        try:
            with self._signals:
                if self._settings.run.model == "init":
                    init = self._folder.init
                    make_if_needed(self._settings, init, self._console, plain=self._plain)
                self._export()
                outcome = self._train()
        except KeyboardInterrupt:
            pass
        if any(read_rows(self._folder.metrics)) and not self._signals.times_urged:
            write_report([self._folder.path])
        if outcome is not None and outcome.is_finished:
            print_result(self._console, self._folder)
            name, model = self._settings.run.name, self._folder.model
            self._say(
                f"to train it further by reward: nyala up SETTINGS --set run.name={name}-rl "
                f"--set run.model={model}"
            )
            return 0
        if outcome is not None:
            self._say(f"stopped: {outcome.reason}" + f": {outcome.error}" * bool(outcome.error))
            self._say(f"its log is {self._folder.log('learner')}")
        self._say(f"to go on from {self._folder.newest_checkpoint() or 'the start'}:")
        self._say(f"  {self._resume_command}")
        if outcome is None:
            return STOPPED
        return SETTINGS_ERROR if outcome.code == SETTINGS_ERROR else FAILED

    def _export(self) -> None:
        """Write the demonstrations and the settings, unless they are there."""
        settings, target = self._settings, self._folder.demonstrations
        if self._folder.config.exists() and target.exists():
            return
        sft = settings.sft
        source = {"count": NUM_PAIRS} if sft.data is None else {"data": sft.data}
        with (
            tempfile.TemporaryDirectory() as scratch,
            self._bar("writing demonstrations in tokens", 0) as display,
        ):
            draft, last = Path(scratch) / "config.yaml", "{}"
            save(with_value(settings, "buffer", "url", None), draft)
            arguments = {"config": draft, "out": target, "held-out": sft.held_out, **source}
            for last in run_to_end(settings, "actor", role_verb("actors", "export", arguments)):
                if (report := progress_in(last)) is not None:
                    display.show({"step": report[0], "steps": report[1]})
        counts = json.loads(last)
        self._say(f"{counts['rows']:,} rows to train on, {counts['held_out']:,} set aside")
        if counts["cut"] or counts["left_out"]:
            context = settings.run.max_prompt_tokens + settings.run.max_completion_tokens
            self._say(
                f"rows longer than run.max_prompt_tokens + run.max_completion_tokens = {context:,} "
                f"tokens: {counts['cut']:,} cut at the end, {counts['left_out']:,} left out, as "
                "none of their trained tokens comes before it"
            )
        self._settings = with_value(settings, "run", "steps", sft.steps(counts["rows"]))
        save(with_value(self._settings, "buffer", "url", None), self._folder.config)

    def _train(self) -> RunOutcome:
        """Start the learner and watch it; it has ended when this returns or raises."""
        settings, folder = self._settings, self._folder
        arguments = {"config": folder.config, "demonstrations": folder.demonstrations}
        gpus = learner_gpus(settings, visible_gpus())
        command = Command(
            "learner",
            "learner",
            tuple(role_verb("learner", "sft", arguments)),
            folder.log("learner"),
            environment_of("learner", settings, gpus=gpus, inherited=os.environ),
        )
        guard = ProcessGuard(grace_s=settings.console.stop_timeout_s)
        stages = Stages({"learner": folder.log("learner")})
        supervisor = Supervisor(
            [Process(command, guard)],
            RestartPolicy(settings.console.max_restarts),
            is_finished=lambda: folder.state is RunState.FINISHED,
            log=self._say,
            last_error=lambda name: cause_of_end(stages.take_error(name), folder.path),
        )
        try:
            with self._bar("starting", settings.run.steps) as display:
                supervisor.start()
                figures, is_training = JsonLinesFollower(folder.metrics), False
                figures.skip_to_end()
                while (outcome := supervisor.tick()) is None:
                    rows = figures.read_new()
                    stage = stages.read_stages()["learner"]
                    if rows or not is_training:
                        display.show(rows[-1] if rows else {"stage": stage})
                    is_training = is_training or bool(rows)
                    time.sleep(SUPERVISE_EVERY_S)
                for row in figures.read_new()[-1:]:
                    display.show(row)
                return outcome
        finally:
            supervisor.stop(
                timeout_s=settings.console.stop_timeout_s,
                times_urged=lambda: self._signals.times_urged,
            )
            guard.close()

    @contextmanager
    def _bar(self, label: str, steps: int) -> Iterator[SupervisedDisplay]:
        is_live = self._console.is_terminal and not self._plain
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
        )
        if not is_live:
            self._say(label)
        with Bar(*columns, console=self._console, disable=not is_live) as bar:
            yield SupervisedDisplay(bar, label, steps, say=None if is_live else self._say)

    def _say(self, text: str) -> None:
        print_line(self._console, text)


class SupervisedDisplay:
    """Progress of a process: a bar on a terminal, else a line every few seconds."""

    def __init__(
        self, bar: Bar, label: str, steps: int, *, say: Callable[[str], None] | None
    ) -> None:
        self._bar, self._say = bar, say
        self._task = bar.add_task(label, total=steps or None)
        self._steps, self._told, self._due = steps, label, time.monotonic()

    def show(self, row: Row) -> None:
        """Show the newest figures, or the stage in which the process is before it has some."""
        if "step" not in row:
            self._tell(str(row["stage"]), is_due=str(row["stage"]) != self._told)
            return
        step, steps = int(number(row, "step")), self._steps or int(number(row, "steps"))
        text = f"step {step}/{steps}" + "".join(
            f", {label} {number(row, key):{form}}"
            for key, label, form in SHOWN
            if row.get(key) is not None
        )
        self._bar.update(self._task, completed=step, total=steps)
        self._tell(text, is_due=time.monotonic() >= self._due or step == steps)

    def _tell(self, text: str, *, is_due: bool) -> None:
        self._bar.update(self._task, description=text)
        if self._say is not None and is_due and text != self._told:
            self._say(text)
            self._told, self._due = text, time.monotonic() + PLAIN_EVERY_S
