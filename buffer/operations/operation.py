"""Operations as values: calls of Lua scripts and reads, and the value made of their replies.

An operation is a generator of calls and needs no client, so one definition serves the blocking and
the asyncio store alike, and one that works in slices can look at a reply before its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Item = TypeVar("Item")

Argument: TypeAlias = "str | bytes | int | float"
Reply: TypeAlias = Any
"""Nested lists of bytes, int and None, as Redis sends them; parsed at once, never passed on."""

SLICE = 128
"""Tasks that one script call moves at most, so that other calls do not wait long."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one script."""

    script: str
    arguments: tuple[Argument, ...]
    records: tuple[bytes, ...] = ()
    """Written before the script runs, no other call in between: the i-th, from 1, is in `in:<i>`.

    Lua would copy them several times, which takes Redis longer than all else that it does for an
    episode; so a script moves a record that it accepts, and unlinks the others.
    """


@dataclass(frozen=True, slots=True)
class Fetch:
    """A read of strings, past Lua for the same reason; a key that is missing gives None."""

    keys: tuple[str, ...]
    """Without the run's prefix."""


Steps: TypeAlias = Generator[Call | Fetch, Reply, T]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T_co]):
    """A named operation on the store, run by `Store.run` or `AsyncStore.run`."""

    name: str
    steps: Callable[[], Steps[T_co]]

    def carry_out(self, ask: Callable[[Call | Fetch], Reply]) -> T_co:
        """Ask for one reply after another, and return the value made of them."""
        steps = self.steps()
        reply: Reply = None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = ask(call)


def single(script: str, arguments: Iterable[Argument], parse: Callable[[Reply], T]) -> Operation[T]:
    """Make an operation of one call."""
    call = Call(script, tuple(arguments))

    def steps() -> Steps[T]:
        return parse((yield call))

    return Operation(script, steps)


def sliced(
    script: str,
    head: Sequence[Argument],
    items: Sequence[Sequence[Argument]],
    parse: Callable[[list[Reply]], T],
    *,
    size: int = SLICE,
) -> Operation[T]:
    """Make an operation that calls a script once per `size` items."""

    def steps() -> Steps[T]:
        replies: list[Reply] = []
        for part in _batches(items, size):
            reply = yield Call(script, (*head, *(x for item in part for x in item)))
            replies.append(reply)
        return parse(replies)

    return Operation(script, steps)


def repeated(script: str, arguments: Iterable[Argument]) -> Operation[int]:
    """Make an operation that calls a script until nothing is left and adds up its counts."""
    call = Call(script, tuple(arguments))

    def steps() -> Steps[int]:
        total, more = 0, 1
        while more:
            count, more = yield call
            total += count
        return total

    return Operation(script, steps)


def nothing(_reply: Reply) -> None:
    """Parse a reply without content."""


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part
