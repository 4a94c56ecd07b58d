"""A run in a store and in the model: every operation goes to both, and their answers are one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from buffer import operations
from buffer.operations.operation import Operation
from tests.buffer.support.model import layout
from tests.buffer.support.model.state import Limits, Model, Refused
from tests.buffer.support.model.stores import PREFIX, Playground

T = TypeVar("T")

EPOCH_US = 1_800_000_000_000_000
LIMITS = Limits()
TTL_MS = 4000
EVERY_MS = 1000
TIMEOUT_MS = 9000
LONGEST_MS = 20_000


class Mismatch(AssertionError):
    """The store and the model differ."""


@dataclass(frozen=True)
class Grant:
    """A lease that somebody has, had, or pretends to have."""

    task: int
    fence: int
    holder: str
    key: str


@dataclass(frozen=True)
class Taken:
    """A ticket that a host has, had, or pretends to have."""

    task: int
    ticket: int
    key: str


@dataclass
class Saved:
    """A moment to which the store may be set back."""

    store: Any
    model: Model


class Modelled:
    """One run in a store and in the model."""

    def __init__(self, store: Playground, seed: int) -> None:
        self.store, self.rng = store, random.Random(seed)
        self.model = Model(LIMITS, EPOCH_US, store.run_id, confirmed_server=store.run_id)
        self.grants: list[Grant] = []
        self.taken: list[Taken] = []
        self.told: list[str] = []
        """What was asked, for the one who reads of a mismatch."""
        self.created = 0
        self.owners = 0
        store.set_clock(EPOCH_US)
        store.run(
            operations.begin_run(
                "c",
                {"environment": "e"},
                units_per_batch=LIMITS.units_per_batch,
                max_policy_lag=LIMITS.max_policy_lag,
                margin=LIMITS.margin,
                group_size=LIMITS.group_size,
                min_group_size=LIMITS.min_group_size,
            )
        )
        meta = store.dump()[f"{PREFIX}:meta".encode()]
        self.settings = layout.settings_of(self.model, meta)
        self.saved = self.save()

    def same(self, operation: Operation[T], predict: Callable[[], T]) -> T | None:
        """Ask both; None if both refuse."""
        self.told.append(operation.name)
        found, wanted = self._outcome(lambda: self.store.run(operation)), self._outcome(predict)
        if found != wanted:
            raise Mismatch(f"{operation.name} answered {found!r}, must answer {wanted!r}")
        return None if isinstance(found, _Refusal) else found

    def _outcome(self, ask: Callable[[], T]) -> T | _Refusal:
        try:
            return ask()
        except Refused as refusal:
            return _Refusal(str(refusal))
        except redis.ResponseError as error:
            return _Refusal(str(error).split(" script:")[0])

    def compare(self) -> None:
        """All that the store holds is what the model holds."""
        found, wanted = (
            layout.plain(self.store.dump(), PREFIX, self.settings),
            layout.expected(self.model),
        )
        if found != wanted:
            differ = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
            key = differ[0]
            held, must = found.get(key), wanted.get(key)
            raise Mismatch(f"{key} holds {held!r}, must hold {must!r}; differ: {differ[:6]}")

        expiring = {key.decode().removeprefix(f"{PREFIX}:") for key in self.store.expiring()}
        temporary = layout.expiring(self.model)
        if expiring != temporary:
            raise Mismatch(f"{expiring} expire, but the model says {temporary}")

    def set_clock(self, now_us: int) -> None:
        """Time passes, or the clock is set."""
        self.model.now_us = max(EPOCH_US // 2, now_us)
        self.store.set_clock(self.model.now_us)

    def save(self) -> Saved:
        """Remember this moment."""
        return Saved(self.store.save(), copy.deepcopy(self.model))

    def rewind(self, saved: Saved) -> None:
        """The store lost what came after a moment; clock and server's life go on."""
        now_us = self.model.now_us
        self.store.restore(saved.store)
        self.model = copy.deepcopy(saved.model)
        self.set_clock(now_us)

    def some(self, most: int = 4) -> list[Grant]:
        """Grants, the newest more often than the rest; some of them forged."""
        rng = self.rng
        recent = self.grants[-12:] if rng.random() < 0.7 else self.grants
        picked = rng.sample(recent, min(len(recent), rng.randint(1, most)))
        return [self._forged(grant) if rng.random() < 0.06 else grant for grant in picked]

    def of_one_key(self, most: int = 4) -> list[Grant]:
        """Grants that go in one message, which is of one key; now and then they are not its own."""
        found = self.some(most)
        if self.rng.random() < 0.2:
            return found
        return [grant for grant in found if grant.key == found[0].key]

    def _forged(self, grant: Grant) -> Grant:
        task = grant.task + self.rng.choice([0, 1, -1, 3])
        fence = grant.fence + self.rng.choice([0, 0, 1, -1])
        key = self.rng.choice(["", grant.key, "fleet~ann"])
        return Grant(max(0, task), fence, grant.holder, key)


class _Refusal(str):
    """The text of a refusal; equal to no reply."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Refusal) and str.__eq__(self, other)

    __hash__ = str.__hash__
