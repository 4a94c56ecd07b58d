"""`python -m agents --config runs/x/config.yaml`: host agents of one run until it ends."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from broker.client import client_of
from broker.transport.keys import load_pair
from configs.durable import private_files
from configs.errors import NyalaError, SettingsError, exit_code
from configs.loader import load
from configs.logging import configure_logging
from configs.machine import raise_open_files
from configs.settings import RunSettings, Settings
from configs.user_python import UserPython, installed_python

from .host import AgentHost
from .process import command_of

log = structlog.get_logger()


@private_files()
def main(arguments: list[str] | None = None) -> int:
    """Host agents; 0 at the end of the run or after SIGTERM, else the `exit_code` of the error."""
    parser = argparse.ArgumentParser(prog="python -m agents", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    parser.add_argument("--key", default="host", help="name of the host's key")
    parser.add_argument(
        "--print", action="store_true", help="print URL, key and task instead of starting a command"
    )
    chosen = parser.parse_args(arguments)
    raise_open_files()
    configure_logging("agents")
    try:
        settings = load(chosen.config, chosen.set)
        check_run(settings.run)
        configure_logging("agents", run=settings.run.name)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_host(settings, chosen.key, is_printing=chosen.print))
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)
    log.info("stopped")
    return 0


def check_run(run: RunSettings) -> None:
    """Refuse runs whose environment makes the turns itself.

    Raises:
        SettingsError: No environment of the run is `agent`.
    """
    if not run.has_agents:
        environments = [alone.environment for alone in run.by_environment.values()]
        raise SettingsError(
            f"run.environment must be agent for `nyala agents`, got "
            f"{', '.join(environments)}; its episodes need no agents"
        )


async def _host(settings: Settings, key: str, *, is_printing: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    agents = settings.agents
    python = None
    command: tuple[str, ...] = ()
    if not is_printing:
        python = await asyncio.to_thread(installed_python, UserPython.of_agents(agents))
        command = command_of(agents, python)
    incarnation = f"{key}-{secrets.token_hex(4)}"
    client = client_of(settings, load_pair(settings.keys_folder, key), incarnation)
    try:
        show = _print_line if is_printing else None
        drain_s = settings.actors.drain_s
        host = AgentHost(client, agents, drain_s=drain_s, command=command, python=python, show=show)
        await host.run(stop)
    finally:
        await client.close()


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
