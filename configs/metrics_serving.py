"""Start of a role's metrics server where its settings ask for it; else nothing is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .metrics import Health, Metric, Values
from .settings import RunSettings


@contextmanager
def serving(
    endpoint: str | None,
    metrics: Sequence[Metric],
    read: Callable[[], Values],
    health: Health,
    *,
    run: RunSettings,
    role: str,
    name: str,
) -> Iterator[None]:
    """Serve metrics during the block; without an endpoint, serve nothing.

    Args:
        endpoint: `metrics_endpoint` of the role's table.
        metrics: All metrics that the page may have.
        read: Returns the values of the metrics.
        health: Health of this process.
        run: Settings of the run.
        role: `actors`, `broker` or `learner`: the role's table of settings.
        name: Name of this process.

    Raises:
        SettingsError: The address cannot be listened on.
    """
    if endpoint is None:
        yield
        return
    from .metrics_server import MetricsServer  # noqa: PLC0415 - 0.15 s of imports that most runs can spare

    server = MetricsServer(
        f"{role}.metrics_endpoint",
        endpoint,
        metrics,
        read,
        health,
        folder=run.folder,
        labels={"run": run.name, "role": role.removesuffix("s"), "name": name},
        or_any_port=role == "actors",  # one more of them on a machine must not fail for this
    ).start()
    try:
        yield
    finally:
        server.close()
