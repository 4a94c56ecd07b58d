"""`nyala up`: everything a run needs, on this machine.

Owns what comes first: settings, what an earlier life left behind, checks. Nothing is written before
the checks have passed. `session.py` does the rest.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from configs.errors import NyalaError
from configs.settings import Settings
from console.display.result import print_result
from console.run.init_model import reuse
from console.run.plan import commands, given_redis, resolve, with_value
from console.run.preflight import refuse_what_cannot_run
from console.run.run_folder import RunFolder, RunState, refuse_changes, settings_of

from .session import Session


@dataclass(frozen=True, slots=True)
class Launch:
    """What a person asked for."""

    config: Path
    overrides: Sequence[str] = ()
    fresh: bool = False
    dry_run: bool = False
    plain: bool = False

    @property
    def command(self) -> str:
        """The command that does the same again, without `--fresh`."""
        flags = [text for override in self.overrides for text in ("--set", override)]
        return shlex.join(["nyala", "up", str(self.config), *flags])


def up(launch: Launch, console: Console) -> int:
    """Carry `nyala up` out and return the exit code.

    Raises:
        NyalaError: The run cannot be started.
    """
    settings = resolve(settings_of(launch.config, launch.overrides))
    folder = RunFolder(settings.run.folder)
    with folder.locked():
        if not launch.fresh and folder.state is RunState.FINISHED:
            console.print(
                f"{settings.run.name} has finished; --fresh begins it anew", soft_wrap=True
            )
            print_result(console, folder)
            return 0
        resumes = not launch.fresh and folder.state is RunState.UNFINISHED
        if resumes:
            refuse_changes(folder, settings)
        redis_url = given_redis(settings, folder)
        refuse_what_cannot_run(settings, redis_url=redis_url)
        if launch.dry_run:
            _print_plan(console, settings, folder)
            return 0
        if launch.fresh:
            _begin_anew(console, settings, folder, redis_url)
        if resumes:
            start = folder.newest_checkpoint() or "the start: there is no checkpoint yet"
            console.print(f"{settings.run.name} goes on from {start}", highlight=False)
        return Session(
            settings,
            folder,
            console,
            redis_url=redis_url,
            resume_command=launch.command,
            plain=launch.plain,
        ).run()


def _begin_anew(
    console: Console, settings: Settings, folder: RunFolder, redis_url: str | None
) -> None:
    """Move an earlier run out of the way, here and on a server that is not ours."""
    if folder.path.exists():
        archived = folder.archive()
        console.print(f"the earlier run is now in {archived}", highlight=False, soft_wrap=True)
        reuse(settings, archived, folder)
    if redis_url is not None:
        from buffer.admin import forget_run

        forget_run(redis_url, settings.run.name)


def _print_plan(console: Console, settings: Settings, folder: RunFolder) -> None:
    """Show what would be started, and with which settings."""
    import yaml

    from buffer.client.address import without_password

    if settings.buffer.url is not None:
        settings = with_value(settings, "buffer", "url", without_password(settings.buffer.url))
    console.print(f"would start in {folder.path} ({folder.state}):", soft_wrap=True)
    for command in commands(settings, folder):
        gpus = command.environment.get("CUDA_VISIBLE_DEVICES")
        where = f"GPU {gpus}" if gpus else f"{command.environment['OMP_NUM_THREADS']} thread(s)"
        console.print(f"  {command.name}: {where}", highlight=False)
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
    console.print(text, highlight=False, markup=False, soft_wrap=True, end="")


def run_up(launch: Launch) -> int:
    """Carry `nyala up` out for a person: errors of ours become their text and code 2."""
    console = Console()
    try:
        return up(launch, console)
    except NyalaError as error:
        print(f"nyala: {error}", file=sys.stderr)
        return 2
