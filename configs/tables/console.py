"""`console`: the display of `nyala up`, and its restarts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Seconds, Table


class ConsoleSettings(Table):
    """The display of `nyala up`, and its restarts."""

    refresh_s: Seconds = 0.5
    """Pause between two looks at the run.

    Raise it over a slow terminal."""
    alarm_s: Seconds = 60.0
    """Wait for episodes without anybody sampling, after which learner, display and `nyala status`
    say so; longer where actors take longer to start.

    Raise it when an actor takes longer to start, such as with a large model."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts of one process within ten minutes before the run stops with an error.

    Raise it on machines where processes are often killed."""
    stop_timeout_s: Seconds = 30.0
    """Time for a process to end cleanly before it is killed.

    Raise it when a last checkpoint takes longer."""
