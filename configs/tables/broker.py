"""`broker`: the server between actors and buffer, for how long it leases, how often it tries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from .base import Address, Endpoint, HttpEndpoint, Positive, Seconds, SettingsTable


class BrokerSettings(SettingsTable):
    """The server between actors and buffer."""

    endpoint: Endpoint = "tcp://127.0.0.1:5757"
    """Address at which the broker listens and actors connect. Port 0 lets `nyala up` choose a free
    one.

    Change it when actors are on other machines, or two runs share this one."""
    advertise: Address | None = None
    """Host, or host and port, at which actors reach this broker if they cannot use its own address,
    such as behind NAT or in a container. The other brokers of the run also send it to actors. null
    = its own.

    Change it when a broker is behind NAT or in a container."""
    keys: Path | None = None
    """Folder of CURVE keys made by `nyala keys`; null means `<run folder>/keys`.

    Change it when several runs or roles share a folder of keys."""
    lease_timeout_s: Seconds = 15.0
    """Time without a heartbeat after which a lease goes to another actor.

    Raise it when actors stall for longer, such as on an overloaded machine."""
    heartbeat_timeout_s: Seconds = 6.0
    """Time of silence after which an actor gets no new leases.

    Raise it when heartbeats come late, such as over a slow network."""
    reap_every_s: Seconds = 1.0
    """Pause between two checks for expired leases; at most a sixth of `lease_timeout_s`.

    Rarely needs a change: lower it when a second counts after an actor's death."""
    max_attempts: Positive = 3
    """Attempts without progress after which a task goes to the dead letters; failures of the task
    itself are counted by `max_data_failures`.

    Raise it when actors are preempted more often than they finish a task."""
    max_data_failures: Positive = 3
    """Failures of the task itself (reward, environment, prompt) after which it goes to the dead
    letters, too; progress does not refill this budget.

    Raise it when an environment or reward sometimes fails for temporary reasons."""
    progress_timeout_s: Seconds = 120.0
    """Time without new tokens after which a lease is taken away, even if heartbeats arrive. If
    prompt and completion together may have more than 256 tokens for each second of it, the time is
    a second for every 256 tokens.

    Raise it when a step of the environment or a reward takes longer."""
    max_message_bytes: Annotated[int, Field(ge=4096)] = 32 * 2**20
    """Largest message accepted from a peer, bytes; a longer one closes its connection.

    Lower it together with `buffer.max_episode_bytes` to bound the broker's memory."""
    long_poll_s: Seconds = 2.0
    """Longest time a lease call waits for work.

    Rarely needs a change: raise it when many idle actors keep the broker busy."""
    max_actors: Positive = 1024
    """Most actors of the run at once, at all of its brokers together.

    Raise it when more actors join."""
    max_actors_per_key: Positive = 1
    """Most incarnations that use one key at once. Actors that share a key can take each other's
    place once a connection is cut; those that share an enrolment key cannot.

    Raise it when actors have to share one key."""
    max_actors_per_enrolment: Positive = 256
    """Most actors at once that one enrolment key has registered.

    Raise it when one enrolment key has to register more."""
    max_inflight_mb_per_actor: Positive = 64
    """Most that the broker holds for one actor at once, MiB: unanswered requests, and unread
    replies of ten seconds. Beyond it the actor is asked to send the rest later.

    Raise it when actors report `busy` though the broker is idle."""
    other_endpoints: tuple[Endpoint, ...] = ()
    """Further brokers of this run, over the same Redis and with the same key; an actor first
    connects to any of the brokers and goes to the next when one is silent. Actors also learn the
    addresses of brokers that start later.

    Change it when one broker is not enough, or may not be a single point of failure."""
    metrics_endpoint: HttpEndpoint | None = None
    """Address at which the broker answers `/metrics`, `/livez` and `/readyz`, such as
    `http://127.0.0.1:9470`; port 0 = a free one, null = none. Readers are not authenticated.

    Change it when Prometheus or a health check reads the broker."""
