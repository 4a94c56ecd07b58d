"""`buffer` and `replay`: the Redis store, and the groups in it that are trained again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Positive, SettingsTable

LARGEST_EPISODE_BYTES = 16 * 2**20


class BufferSettings(SettingsTable):
    """The Redis store of episodes."""

    url: str | None = None
    """`redis://[:password@]host:port/db`, `rediss://` (TLS), `unix://` or
    `redis+sentinel://host:port,host:port/service/db`; null = `nyala up` starts a server of its own.

    Change it to keep the buffer in a server of your own, shared by machines or replicated."""
    maxmemory_mb: Annotated[int, Field(ge=16)] = 1024
    """Memory limit of a server that `nyala up` starts, MiB.

    Raise it for long answers, large groups or more lag."""
    max_run_bytes: Positive | None = None
    """Most bytes of this run's records and unfinished completions in Redis. Above it the actors get
    no work until the learner has committed; null = as much as Redis has.

    Change it when runs share a Redis."""
    pause_at_memory: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of Redis' maxmemory above which no lease is granted.

    Lower it when other data share the server."""
    max_uncommitted_bytes: Positive = 512 * 2**20
    """Records of trained batches that Redis may hold until a checkpoint contains them, bytes; the
    learner checkpoints at once when there are more, or when Redis is 60 % full.

    Lower it when Redis is small, raise it when it causes too many checkpoints."""
    max_episode_bytes: Annotated[int, Field(ge=1024, le=LARGEST_EPISODE_BYTES)] = (
        LARGEST_EPISODE_BYTES
    )
    """Largest episode record, bytes. It must hold the longest episode: 9 for each token of the
    completion, 4 for each of the prompt, and 65,536.

    Lower it with `broker.max_message_bytes` to bound the broker's memory."""
    object_store: str | None = None
    """Store for records larger than `inline_bytes`, as fsspec writes it: `file:///folder`,
    `s3://bucket/folder` (extra `bucket`), ...; broker and learner must reach it. null = all records
    go into Redis.

    Change it when records are large, such as images, and would fill Redis."""
    inline_bytes: Annotated[int, Field(ge=1024)] = 2**20
    """Largest record that goes into Redis where there is an object store, bytes.

    Lower it when Redis fills up though there is an object store."""
    min_group_size: Positive = 2
    """Fewest remaining members with which a group is trained after others became dead letters; a
    smaller group is dropped.

    Raise it when an advantage from few members is too noisy."""
    margin: Annotated[float, Field(ge=1)] = 1.0
    """Admission margin for groups that are expected to be filtered.

    Raise it when a filter leaves the learner waiting for groups."""
    recreate_dropped: bool = True
    """Use the prompt of a group that was dropped as too old once more, in place of a new prompt.
    Otherwise prompts with long answers, which are late more often, would be lost more often.

    Set it to false when prompts that were dropped once should not be sampled again."""
    on_stale: Literal["drop", "mask", "train"] = "drop"
    """Treatment of tokens older than `run.max_policy_lag` when their group is claimed: drop the
    group, mask them and train its other tokens, or train all.

    Set it to `mask` when long episodes are dropped for their first tokens, to `train` when masked
    tokens cost more than their staleness."""


class ReplaySettings(SettingsTable):
    """Reuse of trained groups. Off unless `capacity` is set."""

    capacity: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Episodes kept for reuse once their batch is trained and committed; 0 = each group is trained
    once. The oldest are dropped first.

    Raise it from 0 when sampling is the bottleneck and old episodes still help."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of reused groups in a batch, as soon as enough are kept. They are added to
    `run.groups_per_batch` new ones: 0.5 doubles the batch.

    Raise it when sampling is the bottleneck, lower it when reused groups are too old."""
    sampling: Literal["uniform", "newest", "prioritised"] = "uniform"
    """Groups that a batch reuses: any, the newest, or by `priority`: rank r with a weight of about
    1 / r.

    Set it to `newest` or `prioritised` when uniform reuse helps little."""
    priority: Literal["advantage", "lag"] = "advantage"
    """Order of groups with `sampling: prioritised`: by how much the rewards of a group differ, or
    by how few batches old the group is.

    Change it together with `sampling: prioritised`."""
    max_reuse: Positive = 1
    """Most times that a group is trained again.

    Raise it when groups are expensive to sample."""
    max_lag: Positive = 100
    """Most batches by which a kept group's oldest trained token may lag; older groups are dropped.
    With `buffer.on_stale: mask` older tokens are masked, and groups without a newer one dropped;
    tokens within it are trained, also those that were masked when their group was new.

    Lower it when old groups disturb training (`effective_sample_size` is low)."""
    max_bytes: Positive = 256 * 2**20
    """Records kept in Redis, bytes; fewer where Redis is more than half full.

    Raise it with `capacity` when records are long."""
