"""`python -m learner`: train, replay kept batches, train on demonstrations, or make initial models.

Started by `nyala up`, `nyala learner` and `nyala replay`, and by itself for each of several ranks.

    python -m learner --config runs/x/config.yaml
    python -m learner --config runs/x/config.yaml --nodes 2 --node-rank 1 --rendezvous 10.0.0.1:9000
    python -m learner replay --config runs/x-replay/config.yaml --source runs/x --last 120
    python -m learner sft --config runs/x/config.yaml --demonstrations runs/x/demonstrations
    python -m learner warm-start --config config.yaml --demonstrations shown --out runs/x/init

Exit codes: 0 finished; `learner.exit_when_told`, which is 0 by default, stopped by SIGTERM after a
checkpoint (then there is no summary.json); 2 a person has to change something; 3 another learner
owns the run; anything else is a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import structlog

from broker.transport.keys import load_public
from configs.child import die_with_parent
from configs.durable import private_files
from configs.errors import NyalaError, StoreUnreachable, exit_code
from configs.loader import load
from configs.logging import configure_logging
from configs.machine import raise_open_files, without_collection
from configs.settings import Settings
from configs.tracing import tracing
from configs.worker import Worker

from .launch import Nodes, check_nodes, fits_of, launch, usable_ranks
from .several_machines import launch_node, starter

log = structlog.get_logger()


@private_files()
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; the text of a project error is logged.

    A stop in the middle of a batch ends the process here, from another thread.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command in {"sft", "warm-start"} and chosen.demonstrations is None:
        parser.error(f"{chosen.command} needs --demonstrations")
    if chosen.command == "warm-start" and chosen.out is None:
        parser.error("warm-start needs --out")
    if chosen.command == "replay" and (chosen.source is None or chosen.last is None):
        parser.error("replay needs --source and --last")
    rank = os.environ.get("RANK")
    raise_open_files()
    configure_logging("learner")
    try:
        settings = load(chosen.config, chosen.set)
        configure_logging(
            "learner", run=settings.run.name, incarnation=f"rank-{rank}" if rank else ""
        )
        log.info("starting", stage="importing torch")
        # Before torch is imported, which reads it once: idle OpenMP threads spin and slow actors
        # down.
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.learner.threads))
        if chosen.command == "warm-start":
            with without_collection():
                from .initial_model import warm_start  # noqa: PLC0415 - torch

            warm_start(
                settings.learner,
                seed=settings.run.seed,
                demonstrations=chosen.demonstrations,
                out=chosen.out,
            )
            return 0
        return _train(settings, arguments, chosen)
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)


def _train(settings: Settings, arguments: list[str], chosen: argparse.Namespace) -> int:
    """Run one rank, or launch all ranks of this machine; return the exit code."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    if "RANK" in os.environ:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # the launcher is ours
            die_with_parent()  # other ranks start in place of these
    elif chosen.nodes > 1:
        if chosen.node_rank and _is_over(settings):  # node 0 has ended, and would not answer
            return 0
        return _launch_node(settings, arguments, chosen, stopping) or _exit_code_at_end(settings)
    elif settings.learner.ranks > 1:
        ranks = usable_ranks(settings.learner, fits_of(settings))
        return launch(arguments, ranks=ranks, stopping=stopping) or _exit_code_at_end(settings)
    others = {
        "sft": partial(_train_supervised, settings, chosen.demonstrations),
        "replay": partial(_replay, settings, chosen.source, chosen.last),
    }
    if chosen.command in others:
        return others[chosen.command](stopping)
    with without_collection():
        from .assembly import run_learner  # noqa: PLC0415 - torch

    with _tracing(settings), _signals_in_long_calls(stopping):
        try:
            is_finished = run_learner(settings, stopping, partial(_leave, settings))
        except StoreUnreachable:  # gone before us, and there was nothing to save yet
            if not stopping.is_set():
                raise
            is_finished = False
    log.info("finished" if is_finished else "stopped")
    return (
        0 if "RANK" in os.environ else _exit_code_at_end(settings)
    )  # of a rank its launcher decides


def _train_supervised(settings: Settings, demonstrations: Path, stopping: threading.Event) -> int:
    """Run one rank of supervised training; return the exit code."""
    with without_collection():
        from .sft import train_supervised  # noqa: PLC0415 - torch

    is_finished = train_supervised(settings, demonstrations, stopping)
    log.info("finished" if is_finished else "stopped")
    return 0 if is_finished or "RANK" in os.environ else settings.learner.exit_when_told


def _replay(settings: Settings, source: Path, last: int, stopping: threading.Event) -> int:
    """Run one rank of a replay; return the exit code."""
    with without_collection():
        from .replay import run_replay  # noqa: PLC0415 - torch

    with _signals_in_long_calls(stopping):
        is_finished = run_replay(settings, source, last, stopping)
    log.info("finished" if is_finished else "stopped")
    return 0


@contextmanager
def _signals_in_long_calls(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` at a signal even while the main thread is in a long call.

    A handler of Python runs between two of the main thread's steps, and one backward pass is one.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def read_signals() -> None:
        while number := os.read(reading, 1):
            if number[0] in {signal.SIGTERM, signal.SIGINT}:
                stopping.set()
        os.close(reading)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    Worker(read_signals, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


def _leave(settings: Settings, error: Exception | None) -> None:
    """End this process from a thread: after a request to stop, or because of an error."""
    code = 0 if "RANK" in os.environ else _exit_code_at_end(settings)
    if error is None:
        log.info("stopped")
    else:  # whose text its thread has logged
        code = exit_code(error) if isinstance(error, NyalaError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code_at_end(settings: Settings) -> int:
    """Return the exit code of a learner that has ended well: at the last batch, or on request."""
    return 0 if _is_over(settings) else settings.learner.exit_when_told


def _is_over(settings: Settings) -> bool:
    """Return whether the last batch has been trained; the run may have been prolonged since."""
    try:
        summary = json.loads((settings.run.folder / "summary.json").read_text(encoding="utf-8"))
    except OSError:
        return False
    return bool(summary["steps"] >= settings.run.steps)


def _tracing(settings: Settings) -> AbstractContextManager[None]:
    """Trace episodes on rank 0, where the settings ask for it."""
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    keys = settings.keys_folder
    return tracing(settings.run, "learner", salt=lambda: load_public(keys, "broker"))


def _launch_node(
    settings: Settings,
    arguments: list[str],
    chosen: argparse.Namespace,
    stopping: threading.Event,
) -> int:
    learner = settings.learner
    host, port = check_nodes(settings.run, chosen.nodes, chosen.node_rank, chosen.rendezvous)
    nodes = Nodes(
        chosen.nodes,
        chosen.node_rank,
        host,
        port,
        ranks=lambda: usable_ranks(learner, has_other_nodes=True),
        min_ranks=learner.min_ranks,
        fits=fits_of(settings),
    )
    return launch_node(nodes, starter(arguments), stopping)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m learner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", nargs="?", choices=("train", "replay", "sft", "warm-start"), default="train"
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    parser.add_argument("--nodes", type=int, default=1, help="machines of the learner")
    parser.add_argument("--node-rank", type=int, default=0, help="this one, from 0")
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="of node 0")
    parser.add_argument("--source", type=Path, help="replay: the run that kept the batches")
    parser.add_argument("--last", type=int, help="replay: the last batch")
    parser.add_argument("--demonstrations", type=Path, help="sft, warm-start: rows in tokens")
    parser.add_argument("--out", type=Path, help="warm-start: where the model goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
