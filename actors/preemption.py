"""Preemption notices of the clouds: a drain before the machine is taken away.

A spot machine gets from 30 seconds (Azure, Google) to two minutes (AWS) of warning. The metadata
service is polled every few seconds; the first notice stops the actor as SIGTERM does: it releases
its leases with every token kept, and no attempt is charged.

Sources: AWS "Spot Instance interruption notices" (IMDSv2), Google Cloud "Preemptible VM instances",
Azure "Scheduled Events".
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import structlog

from configs.errors import quoted

log = structlog.get_logger()

Cloud: TypeAlias = Literal["none", "aws", "gcp", "azure"]

POLL_S = 2.0  # the shortest warning is 30 s, a drain takes 10
ANSWER_S = 1.0  # the service is on the machine itself
TOKEN_TTL_S = 60
LINK_LOCAL = "http://169.254.169.254"
SILENT_LOOKS = 30  # a minute without any answer is logged once: the setting may be wrong


class Notices(Protocol):
    """A source of preemption notices."""

    def poll_notice(self) -> str | None:
        """Poll once, blocking for at most about a second; return the notice, or None.

        Raises:
            OSError: The service did not answer, or its answer is malformed.
        """
        ...


class AwsNotices:
    """EC2: `spot/instance-action` exists from two minutes before the end."""

    def __init__(self, endpoint: str = LINK_LOCAL) -> None:
        self._endpoint = endpoint

    def poll_notice(self) -> str | None:
        """Ask for an interruption; see `Notices.poll_notice`."""
        token = _fetch(
            f"{self._endpoint}/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)},
            method="PUT",
        )
        return _fetch(
            f"{self._endpoint}/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": token or ""},
        )


class GcpNotices:
    """Compute Engine: `instance/preempted` turns TRUE 30 seconds before the end."""

    def __init__(self, endpoint: str = LINK_LOCAL) -> None:
        self._endpoint = endpoint

    def poll_notice(self) -> str | None:
        """Ask whether the machine is preempted; see `Notices.poll_notice`."""
        url = f"{self._endpoint}/computeMetadata/v1/instance/preempted"
        answer = _fetch(url, {"Metadata-Flavor": "Google"})
        return "preempted" if answer is not None and answer.strip() == "TRUE" else None


class AzureNotices:
    """Virtual Machines: a scheduled event of type Preempt, at least 30 seconds before the end."""

    def __init__(self, endpoint: str = LINK_LOCAL) -> None:
        self._endpoint = endpoint

    def poll_notice(self) -> str | None:
        """Ask for scheduled events; see `Notices.poll_notice`."""
        url = f"{self._endpoint}/metadata/scheduledevents?api-version=2020-07-01"
        answer = _fetch(url, {"Metadata": "true"})
        try:
            events = json.loads(answer or "{}").get("Events", [])
            taken = [event for event in events if event.get("EventType") == "Preempt"]
        except (ValueError, AttributeError, TypeError) as error:
            raise OSError(
                f"scheduled events must be a JSON object, got {quoted(answer)}"
            ) from error
        return f"not before {taken[0].get('NotBefore', 'now')}" if taken else None


SOURCES: Mapping[Cloud, Callable[[], Notices]] = MappingProxyType(
    {"aws": AwsNotices, "gcp": GcpNotices, "azure": AzureNotices}
)


def source_of(cloud: Cloud) -> Notices | None:
    """Return the notices of a cloud; None for `none`."""
    make = SOURCES.get(cloud)
    return None if make is None else make()


@asynccontextmanager
async def stop_at_notice(source: Notices | None, stop: asyncio.Event) -> AsyncIterator[None]:
    """Set `stop` at the first notice of a source, for as long as the block runs."""
    if source is None:
        yield
        return
    watch = asyncio.create_task(_stop_once_noticed(source, stop))
    try:
        yield
    finally:
        watch.cancel()


async def _stop_once_noticed(source: Notices, stop: asyncio.Event) -> None:
    await until_noticed(source)
    stop.set()


async def until_noticed(source: Notices, *, poll_s: float = POLL_S) -> str:
    """Wait for a notice and return it; a service that does not answer is polled further.

    A minute without an answer is logged. Each look runs in a thread: a metadata service that hangs
    must not stop the heartbeats.
    """
    silent = 0
    while True:
        try:
            notice = await asyncio.to_thread(source.poll_notice)
            silent = 0
        except OSError as error:
            notice = None
            silent += 1
            if silent == SILENT_LOOKS:
                log.warning(
                    "no preemption notices: the metadata service does not answer; "
                    "is actors.preemption this machine's cloud?",
                    reason=str(error),
                )
        if notice is not None:
            log.warning("this machine is about to be taken away", notice=notice)
            return notice
        await asyncio.sleep(poll_s)


def _fetch(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
    """Return the text at a URL of the metadata service; None where there is nothing (404)."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - http
    # The service is on this machine: a proxy of the environment must not be used for it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ANSWER_S) as answer:
            return answer.read(65536).decode(errors="replace")  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
