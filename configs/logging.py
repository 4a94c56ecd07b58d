"""Logs of every process: one JSON object per line on stderr, with role and run.

Owns the shape of a line: `event`, `level`, `timestamp`, then role, run, version and incarnation. A
line about the progress of a start has the key `stage`, which `nyala up` shows. On a terminal the
same lines are coloured text. Lines of the standard library's loggers come out the same way.

Example:
    configure_logging("actor", run="demo", incarnation="host-1a2b")
    structlog.get_logger().info("starting", stage="importing vLLM")
    bind_version("1.12")  # every later line of this process names the policy version
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from .errors import NyalaError, printable_lines

NOISY = ("vllm", "transformers", "torch", "asyncio", "urllib3", "httpx", "filelock")
"""Libraries whose warnings and chatter a person running Nyala cannot act on."""

_bound: dict[str, str] = {}
"""Process-wide fields. Context variables would be lost in the threads of engine and feeder."""


def configure_logging(role: str, *, run: str = "", incarnation: str = "") -> None:
    """Route all logging of this process to stderr, warnings and uncaught errors included.

    To be called before vLLM and torch are imported. Replaces the handlers of the root logger, and
    does what `quiet_libraries` does. A second call changes the fields of later lines.

    Args:
        role: `broker`, `learner`, `actor`, `publisher` or `console`.
        run: Name of the run.
        incarnation: This life of the process, where it has one.
    """
    _bound.clear()
    _bound.update(role=role)
    if run:
        _bound.update(run=run)
    if incarnation:
        _bound.update(incarnation=incarnation)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_bound,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(sys.stderr.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    quiet_libraries()
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def bind_version(version: str) -> None:
    """Put the policy version, such as `1.12` for lineage 1 and step 12, into every later line."""
    _bound["version"] = version


def _add_bound(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key, value in _bound.items():
        event.setdefault(key, value)
    return event


def _write_out(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape control characters in text from elsewhere, unless it is JSON, which does so itself."""
    return {
        key: printable_lines(value) if isinstance(value, str) else value
        for key, value in event.items()
    }


def _rendering(is_terminal: bool) -> list[Processor]:
    if is_terminal:
        # A traceback with the values of all variables takes seconds to draw, and shows passwords.
        plain = structlog.dev.plain_traceback
        return [
            _write_out,
            structlog.dev.ConsoleRenderer(pad_event_to=0, exception_formatter=plain),
        ]
    render: Callable[..., str | bytes] = structlog.processors.JSONRenderer(default=str)
    return [structlog.processors.format_exc_info, render]


def quiet_libraries() -> None:
    """Keep warnings of libraries out of a terminal; call before importing torch and vLLM.

    Sets variables of the environment where they are not set, which child processes inherit.
    """
    # vLLM installs handlers of its own when it is imported, unless this is set beforehand.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|vllm)\.")
    # torch sets the levels of its loggers when it is imported; a filter stays.
    logging.getLogger("torch._library.triton").addFilter(_is_error)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    log = structlog.get_logger()
    if issubclass(kind, KeyboardInterrupt):
        log.warning("interrupted")
    elif issubclass(kind, NyalaError):
        # Its text is written for people; the traceback would only bury it.
        log.error(str(error), error=kind.__name__)
    else:
        log.error("died of an unexpected error", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(ended: threading.ExceptHookArgs) -> None:
    """Log the death of a thread of a library, which is no `Worker`."""
    log = structlog.get_logger()
    name = ended.thread.name if ended.thread is not None else "unknown"
    kind, error, traceback = ended.exc_type, ended.exc_value, ended.exc_traceback
    if not issubclass(kind, SystemExit):
        log.error(
            "a thread died of an unexpected error",
            thread=name,
            exc_info=(kind, error if error is not None else kind(), traceback),
        )
