"""`replay`: groups that are trained again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Positive, Table


class ReplaySettings(Table):
    """Reuse of trained groups. Off unless `capacity` is set."""

    capacity: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Episodes kept for reuse once their batch is trained and committed; 0 = each group is trained
    once. The oldest go first.

    Raise it from 0 when sampling is the bottleneck and old episodes still help."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of a batch's groups that are reused ones, as soon as enough are kept. They come on top
    of `run.groups_per_batch` new ones: 0.5 doubles the batch.

    Raise it when sampling is the bottleneck, down when reused groups are too old."""
    sampling: Literal["uniform", "newest", "prioritised"] = "uniform"
    """What a batch gets: any, the newest, or by `priority`: rank r with about 1 / r.

    Set it to `newest` or `prioritised` when uniform reuse teaches little."""
    priority: Literal["advantage", "lag"] = "advantage"
    """What `prioritised` ranks by: how far the rewards of a group lie apart, or how few batches
    behind it is.

    Matters with `sampling: prioritised`: choose by what makes a group worth it."""
    max_reuse: Positive = 1
    """How often a group may be trained again.

    Raise it when groups are dear to sample."""
    max_lag: Positive = 100
    """A group whose oldest trained token is more batches behind is forgotten, batches.

    Lower it when old groups disturb training (`effective_sample_size` is low)."""
    max_bytes: Positive = 256 * 2**20
    """Records kept in Redis, bytes; fewer where Redis is more than half full.

    Raise it with `capacity` when records are long."""
