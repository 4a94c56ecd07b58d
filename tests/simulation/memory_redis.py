"""The part of Redis that the scripts of `buffer/lua` use, in memory, with an injected clock.

Its replies are those of a real server: `test_memory_redis.py` plays the same histories to
both. Sets keep the order of insertion, so that nothing depends on a hash seed. An unknown command
is an error that names it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, TypeAlias

Reply: TypeAlias = Any
"""bytes, int, None, or a list of these."""


class Members(dict[bytes, None]):
    """A set that remembers the order of insertion."""


class SortedSet:
    """Members by score, then by name."""

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def copy(self) -> SortedSet:
        other = SortedSet()
        other.scores, other.order = dict(self.scores), list(self.order)
        return other

    def put(self, member: bytes, score: float) -> int:
        """Add or move a member; 1 if it is new."""
        is_new = self.take(member) == 0
        self.scores[member] = score
        bisect.insort(self.order, (score, member))
        return int(is_new)

    def take(self, member: bytes) -> int:
        """Remove a member; 1 if it was there."""
        score = self.scores.pop(member, None)
        if score is None:
            return 0
        del self.order[bisect.bisect_left(self.order, (score, member))]
        return 1

    def between(self, low: bytes, high: bytes) -> list[tuple[float, bytes]]:
        """Those whose score lies between two limits, `(` = exclusive."""
        first = _limit(low, is_low=True)
        last = _limit(high, is_low=False)
        return self.order[
            bisect.bisect_left(self.order, first) : bisect.bisect_left(self.order, last)
        ]


def _limit(text: bytes, *, is_low: bool) -> tuple[float] | tuple[float, bytes]:
    """The position in the order where a limit cuts: (score,) sorts before every (score, member)."""
    is_open = text.startswith(b"(")
    score = float(text.lstrip(b"("))
    beyond = is_open if is_low else not is_open
    return (score, b"\xff" * 16) if beyond else (score,)


def _number(score: float) -> bytes:
    return b"%d" % score if score == int(score) else b"%.17g" % score


class MemoryRedis:
    """A database; `execute` is one command."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin empty; `clock` gives Unix seconds."""
        self._clock = clock
        self._values: dict[bytes, Any] = {}
        self._expires: dict[bytes, float] = {}
        self._next_expiry = float("inf")
        self.run_id = "0" * 40
        self._commands = {
            name.removeprefix("_do_").upper().encode(): getattr(self, name)
            for name in dir(self)
            if name.startswith("_do_")
        }

    def execute(self, command: bytes, *arguments: bytes) -> Reply:
        """Carry a command out."""
        if self._clock() >= self._next_expiry:
            self._expire()
        return self._commands[command](*arguments)

    def copy(self) -> MemoryRedis:
        """A database of its own with the same contents: what an earlier moment looked like."""
        other = MemoryRedis(self._clock)
        other._values = {key: _copied(value) for key, value in self._values.items()}
        other._expires = dict(self._expires)
        other._next_expiry = self._next_expiry
        other.run_id = self.run_id
        return other

    @property
    def expiries(self) -> dict[bytes, float]:
        """When keys go by themselves."""
        return self._expires

    def dump(self) -> dict[bytes, Any]:
        """All contents in a form that can be compared."""
        return {key: _plain(value) for key, value in sorted(self._values.items())}

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, at in self._expires.items() if at <= now]:
            self._do_unlink(key)
        self._next_expiry = min(self._expires.values(), default=float("inf"))

    def _make(self, key: bytes, kind: type[Any]) -> Any:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _tidy(self, key: bytes) -> None:
        """An empty collection does not exist."""
        value = self._values.get(key)
        if value is not None and not (value.scores if isinstance(value, SortedSet) else value):
            self._do_unlink(key)

    # --- keys and server

    def _do_time(self) -> Reply:
        micros = round(self._clock() * 1e6)
        return [b"%d" % (micros // 10**6), b"%d" % (micros % 10**6)]

    def _do_info(self, *_section: bytes) -> Reply:
        return f"run_id:{self.run_id}\r\nused_memory:1000000\r\nmaxmemory:0\r\n".encode()

    def _do_unlink(self, *keys: bytes) -> Reply:
        for key in keys:
            self._expires.pop(key, None)
        return sum(self._values.pop(key, None) is not None for key in keys)

    _do_del = _do_unlink

    def _do_exists(self, *keys: bytes) -> Reply:
        return sum(key in self._values for key in keys)

    def _do_expire(self, key: bytes, seconds: bytes) -> Reply:
        if key not in self._values:
            return 0
        self._expires[key] = self._clock() + int(seconds)
        self._next_expiry = min(self._next_expiry, self._expires[key])
        return 1

    # --- strings and bitmaps

    def _do_get(self, key: bytes) -> Reply:
        value = self._values.get(key)
        return None if value is None else bytes(value)

    def _do_set(self, key: bytes, value: bytes) -> Reply:
        self._expires.pop(key, None)
        self._values[key] = value
        return b"OK"

    def _do_rename(self, key: bytes, other: bytes) -> Reply:
        self._expires.pop(other, None)
        self._values[other] = self._values.pop(key)
        return b"OK"

    def _do_mget(self, *keys: bytes) -> Reply:
        return [self._do_get(key) for key in keys]

    def _do_strlen(self, key: bytes) -> Reply:
        return len(self._values.get(key, b""))

    def _do_setbit(self, key: bytes, offset: bytes, bit: bytes) -> Reply:
        bits = self._make(key, bytearray)
        byte, mask = int(offset) // 8, 0x80 >> int(offset) % 8
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        before = int(bool(bits[byte] & mask))
        bits[byte] = bits[byte] | mask if bit == b"1" else bits[byte] & ~mask
        return before

    def _do_bitfield(self, key: bytes, *changes: bytes) -> Reply:
        """Only `SET u<n> offset 2**n - 1`, again and again, as the scripts use it."""
        for at in range(0, len(changes), 4):
            name, kind, offset, value = changes[at : at + 4]
            run = int(kind[1:])
            assert (name, int(value)) == (b"SET", 2**run - 1), changes
            for bit in range(int(offset), int(offset) + run):
                self._do_setbit(key, b"%d" % bit, b"1")
        return []

    def _do_getbit(self, key: bytes, offset: bytes) -> Reply:
        bits, byte = self._values.get(key, b""), int(offset) // 8
        return int(byte < len(bits) and bool(bits[byte] & 0x80 >> int(offset) % 8))

    def _do_bitcount(self, key: bytes) -> Reply:
        return int.from_bytes(self._values.get(key, b""), "big").bit_count()

    # --- hashes

    def _do_hset(self, key: bytes, *pairs: bytes) -> Reply:
        fields = self._make(key, dict)
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def _do_hsetnx(self, key: bytes, field: bytes, value: bytes) -> Reply:
        return 0 if self._do_hexists(key, field) else self._do_hset(key, field, value)

    def _do_hget(self, key: bytes, field: bytes) -> Reply:
        return self._values.get(key, {}).get(field)

    def _do_hmget(self, key: bytes, *fields: bytes) -> Reply:
        found = self._values.get(key, {})
        return [found.get(field) for field in fields]

    def _do_hgetall(self, key: bytes) -> Reply:
        return [part for pair in self._values.get(key, {}).items() for part in pair]

    def _do_hkeys(self, key: bytes) -> Reply:
        return list(self._values.get(key, {}))

    def _do_hlen(self, key: bytes) -> Reply:
        return len(self._values.get(key, {}))

    def _do_hexists(self, key: bytes, field: bytes) -> Reply:
        return int(field in self._values.get(key, {}))

    def _do_hdel(self, key: bytes, *fields: bytes) -> Reply:
        found = self._values.get(key, {})
        removed = sum(found.pop(field, None) is not None for field in fields)
        self._tidy(key)
        return removed

    def _do_hincrby(self, key: bytes, field: bytes, by: bytes) -> Reply:
        fields = self._make(key, dict)
        total = int(fields.get(field, b"0")) + int(by)
        fields[field] = b"%d" % total
        return total

    # --- lists

    def _do_rpush(self, key: bytes, *values: bytes) -> Reply:
        items = self._make(key, list)
        items.extend(values)
        return len(items)

    def _do_lrange(self, key: bytes, first: bytes, last: bytes) -> Reply:
        return _part(self._values.get(key, []), first, last)

    def _do_llen(self, key: bytes) -> Reply:
        return len(self._values.get(key, []))

    # --- sets

    def _do_sadd(self, key: bytes, *members: bytes) -> Reply:
        found = self._make(key, Members)
        before = len(found)
        found.update(dict.fromkeys(members))
        return len(found) - before

    def _do_srem(self, key: bytes, *members: bytes) -> Reply:
        found = self._values.get(key, {})
        before = len(found)
        for member in members:
            found.pop(member, None)
        removed = before - len(found)
        self._tidy(key)
        return removed

    def _do_smembers(self, key: bytes) -> Reply:
        return list(self._values.get(key, {}))

    def _do_smove(self, source: bytes, target: bytes, member: bytes) -> Reply:
        if not self._do_srem(source, member):
            return 0
        self._do_sadd(target, member)
        return 1

    def _do_sismember(self, key: bytes, member: bytes) -> Reply:
        return int(member in self._values.get(key, {}))

    def _do_smismember(self, key: bytes, *members: bytes) -> Reply:
        found = self._values.get(key, {})
        return [int(member in found) for member in members]

    def _do_scard(self, key: bytes) -> Reply:
        return len(self._values.get(key, {}))

    def _do_srandmember(self, key: bytes, count: bytes) -> Reply:
        return list(self._values.get(key, {}))[: int(count)]

    def _do_sinter(self, *keys: bytes) -> Reply:
        first, *others = (self._values.get(key, {}) for key in keys)
        return [member for member in first if all(member in other for other in others)]

    # --- sorted sets

    def _sorted(self, key: bytes) -> SortedSet:
        return self._values.get(key) or SortedSet()

    def _do_zadd(self, key: bytes, *pairs: bytes) -> Reply:
        found = self._make(key, SortedSet)
        scored = zip(pairs[::2], pairs[1::2], strict=True)
        return sum(found.put(member, float(score)) for score, member in scored)

    def _do_zrem(self, key: bytes, *members: bytes) -> Reply:
        found = self._sorted(key)
        removed = sum(found.take(member) for member in members)
        self._tidy(key)
        return removed

    def _do_zcard(self, key: bytes) -> Reply:
        return len(self._sorted(key).order)

    def _do_zscore(self, key: bytes, member: bytes) -> Reply:
        score = self._sorted(key).scores.get(member)
        return None if score is None else _number(score)

    def _do_zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> Reply:
        return _listed(_part(self._sorted(key).order, first, last), options)

    def _do_zrangebyscore(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> Reply:
        found = self._sorted(key).between(low, high)
        if b"LIMIT" in options:
            at = options.index(b"LIMIT")
            start, count = int(options[at + 1]), int(options[at + 2])
            found = found[start : start + count]
        return _listed(found, options)

    def _do_zcount(self, key: bytes, low: bytes, high: bytes) -> Reply:
        return len(self._sorted(key).between(low, high))

    def _do_zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> Reply:
        return self._do_zrem(key, *(member for _, member in self._sorted(key).between(low, high)))


def _part(items: list[Any], first: bytes, last: bytes) -> list[Any]:
    """Redis' ranges include their end and count from the back below zero."""
    start, stop = int(first), int(last)
    start = max(0, start + len(items)) if start < 0 else start
    stop = stop + len(items) if stop < 0 else stop
    return items[start : stop + 1]


def _listed(found: list[tuple[float, bytes]], options: tuple[bytes, ...]) -> list[bytes]:
    if b"WITHSCORES" in options:
        return [part for score, member in found for part in (member, _number(score))]
    return [member for _, member in found]


def _copied(value: Any) -> Any:
    if isinstance(value, bytes):
        return value
    return Members(value) if isinstance(value, Members) else value.copy()


def _plain(value: Any) -> Any:
    if isinstance(value, SortedSet):
        return value.order
    if isinstance(value, Members):
        return sorted(value)
    return bytes(value) if isinstance(value, bytearray) else value
