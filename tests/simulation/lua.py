"""The real scripts of `buffer/lua` over the Redis in memory, run by Lua 5.1 as Redis runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from lupa import lua51

from buffer.client.scripts import Script
from tests.simulation.memory_redis import MemoryRedis, Reply

LONGEST_UNPACK = 4000  # Lua's stack is bounded

_SETUP = """
local ask, pack = ...
redis = {
  call = function(...) return ask(...) end,
  error_reply = function(text) return { err = text } end,
}
local parts = function(list) return unpack(list) end
local compile = function(source)
  return assert(loadstring('return function(KEYS, ARGV) ' .. source .. '\\nend'))()
end
return parts, compile
"""


class Scripts:
    """Compiled scripts and the database they work on."""

    def __init__(self, database: MemoryRedis) -> None:
        self.database = database
        """May be exchanged for another one: that is what a rewind is."""
        # Strings stay bytes, and a script sees nothing of Python but the one function it is given.
        self._lua = lua51.LuaRuntime(
            encoding=None, unpack_returned_tuples=True, register_eval=False
        )
        self._table = self._lua.table_from
        setup = self._lua.eval(b"function(source) return loadstring(source) end")(_SETUP.encode())
        self._parts, self._compile = setup(self._call)
        self._functions: dict[str, Any] = {}

    def run(self, script: Script, key: str, arguments: Sequence[Any]) -> Reply:
        """Run a script to its end; nobody else can come in between.

        Raises:
            redis.ResponseError: The script returned an error.
        """
        function = self._functions.get(script.sha)
        if function is None:
            function = self._functions[script.sha] = self._compile(script.source.encode())
        keys, values = [key.encode()], [_bytes(argument) for argument in arguments]
        return self._reply(function(self._table(keys), self._table(values)))

    def _call(self, command: bytes, *arguments: Any) -> Any:
        execute = self.database.execute
        reply = execute(command, *[a if type(a) is bytes else _bytes(a) for a in arguments])
        if type(reply) is list:
            return self._table([False if item is None else item for item in reply])
        return False if reply is None else reply

    def _reply(self, value: Any) -> Reply:
        if value is None or value is False:
            return None
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            return int(value)
        error = value[b"err"]
        if error is not None:
            raise redis.ResponseError(error.decode())
        length = len(value)
        if length > LONGEST_UNPACK:
            return [self._reply(value[i + 1]) for i in range(length)]
        parts = self._parts(value)
        if length == 1:
            parts = (parts,)
        return [self._reply(part) for part in parts or ()]


def _bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    return b"%d" % value if value == int(value) else b"%.17g" % value
