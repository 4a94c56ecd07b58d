"""Tests and the program that they call, in two sandboxed processes: only plain data crosses.

    run_tests --a call, its arguments--> answer_calls --the result, as plain data--> run_tests

`entry.py` runs one of these roles in each process. The program never sees the expected results, and
cannot change the comparison: it hands over only numbers, texts and collections of them, or the
number of an object that stays in its process.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO

PASSED = b"passed\n"
FAILED = 1

MAX_MESSAGE_BYTES = 1 << 24
MAX_ITEMS = 1 << 20  # of an iterator, which is handed over as a list
FLOAT_TOLERANCE = 1e-6

ENDS_A_LOOP = (StopIteration, StopAsyncIteration)
"""Errors that a loop over results would take for the end of the results."""

COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}


class ProgramError(Exception):
    """The program raised an error of a class that is not Python's own."""


class RemoteObject:
    """An object of the program, in the process of the tests: attributes and calls, no more."""

    def __init__(self, calls: ProgramConnection, number: int) -> None:
        self._calls = calls
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packed = [pack(args), pack(kwargs)]
        return self._calls.send_request({"object": self._number, "call": packed})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._calls.send_request({"object": self._number, "attribute": name})


class ProgramConnection:
    """The tests' end of the pipes to the program."""

    def __init__(self, replies: int, requests: int) -> None:
        self._replies = os.fdopen(replies, "rb")
        self._requests = os.fdopen(requests, "wb")

    def names(self) -> dict[str, Any]:
        """Wait until the program has run, and return the names that it defined.

        Modules that it imported are imported anew here, without the program's changes to them.
        """
        said = _receive(self._replies)
        public = {name: value for name, value in said["names"].items() if not name.startswith("__")}
        names = {name: self.unpack(value) for name, value in public.items()}
        for name in said["modules"]:
            if name in sys.stdlib_module_names:
                names[name] = importlib.import_module(name)
        return names

    def send_request(self, request: dict[str, Any]) -> Any:
        """Send a request to the program; return its result, or raise its error.

        The process of the tests ends with status `FAILED` where the program has ended.

        Raises:
            ProgramError: The program raised an error of a class of its own.
            Exception: The program raised an error of this class of Python's.
        """
        _send(self._requests, request)
        reply = _receive(self._replies)
        if "raised" in reply:
            kind: Any = getattr(builtins, str(reply["raised"]), None)
            ours = isinstance(kind, type) and issubclass(kind, Exception)
            error = kind if ours and not issubclass(kind, ENDS_A_LOOP) else ProgramError
            raise error(str(reply.get("text")))
        return self.unpack(reply["value"])

    def unpack(self, value: Any) -> Any:
        """Return the value of a message."""
        return unpack(value, lambda number: RemoteObject(self, number))


def run_tests(replies: int, requests: int, source: str) -> None:
    """Run test code whose free names are the program's; the test passes if nothing is raised.

    Functions `test_…` are called, and `from solution import f` finds the program's `f`. Names of
    Python's own, `abs` or `math`, are Python's, whatever the program has defined.
    """
    verdict = os.dup(1)
    os.dup2(2, 1)  # texts that the tests print are no verdict
    names = ProgramConnection(replies, requests).names()
    solution = sys.modules["solution"] = types.ModuleType("solution")
    vars(solution).update(names)
    module = types.ModuleType("tests")
    vars(module).update({name: names[name] for name in names if not _is_of_python(name, names)})
    exec(compile(source, "tests.py", "exec"), vars(module))  # noqa: S102 - the row's tests
    for name, value in list(vars(module).items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            value()
    os.write(verdict, PASSED)


def run_calls(replies: int, requests: int, cases: str) -> None:
    """Call one function with the arguments of each case, and compare its results.

    Writes `PASSED` if all are right; the process ends with status `FAILED` at the first wrong one.
    """
    said = json.loads(cases)
    names = ProgramConnection(replies, requests).names()
    name = said["function"]
    function = names[name] if name in names else getattr(names["Solution"](), name)
    for arguments, wanted in said["cases"]:
        if not alike(function(*arguments), wanted):
            os._exit(FAILED)
    os.write(1, PASSED)


def answer_calls(requests: int, replies: int, program: str) -> None:
    """Run a program, then answer the requests of the tests, until they end."""
    module = sys.modules["program"] = types.ModuleType("program")
    exec(compile(program, "program.py", "exec"), vars(module))  # noqa: S102 - what this is for
    objects: list[Any] = []

    def keep(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    modules = [name for name, value in public.items() if isinstance(value, types.ModuleType)]
    names = {name: pack(value, keep) for name, value in public.items() if name not in modules}
    incoming, outgoing = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
    _send(outgoing, {"names": names, "modules": modules})
    while True:
        request = _receive(incoming)
        try:
            reply = {"value": pack(_executed(request, objects), keep)}
        except Exception as error:  # noqa: BLE001 - the program's, and the tests may wait for it
            reply = {"raised": type(error).__name__, "text": str(error)[:200]}
        _send(outgoing, reply)


def _is_of_python(name: str, names: dict[str, Any]) -> bool:
    is_module = name in sys.stdlib_module_names and not isinstance(names[name], types.ModuleType)
    return is_module or hasattr(builtins, name)


def _executed(request: dict[str, Any], objects: list[Any]) -> object:
    target = objects[request["object"]]
    if "attribute" in request:
        return getattr(target, request["attribute"])
    args, kwargs = (unpack(packed, objects.__getitem__) for packed in request["call"])
    return target(*args, **kwargs)


def pack(value: Any, keep: Callable[[object], int] | None = None) -> Any:
    """Write a value as JSON that keeps its type.

    Raises:
        TypeError: The value is no plain data, and there is no `keep` to give objects numbers.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, RemoteObject):
        return {"object": value._number}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(item, keep)] for key, item in value.items()]}
    if isinstance(value, Iterator):
        value = list(islice(value, MAX_ITEMS))
    for kind in ("list", "tuple", "set", "frozenset"):
        if isinstance(value, COLLECTIONS[kind]):  # type: ignore[arg-type]
            return {kind: [pack(item, keep) for item in value]}
    if keep is None:
        raise TypeError(
            "an argument that a test gives to the program must be a number, text, bytes, None or a "
            f"collection of these, got {type(value).__name__}; change the tests of this row"
        )
    return {"object": keep(value)}


def unpack(packed: Any, find: Callable[[int], Any]) -> Any:
    """Return the value that `pack` wrote; `find` returns objects by their numbers."""
    if not isinstance(packed, dict):
        return packed
    ((kind, items),) = packed.items()
    if kind == "object":
        return find(items)
    if kind == "bytes":
        return bytes.fromhex(items)
    return COLLECTIONS[kind](
        tuple(unpack(part, find) for part in item) if kind == "dict" else unpack(item, find)
        for item in items
    )


def alike(value: Any, wanted: Any) -> bool:
    """Whether a result equals JSON, which has no tuples and writes few digits."""
    if isinstance(value, tuple | list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(alike, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        same_keys = {str(key) for key in value} == set(wanted)
        return same_keys and all(alike(item, wanted[str(key)]) for key, item in value.items())
    if float in (type(value), type(wanted)):
        return _is_near(value, wanted)
    return type(value) is type(wanted) and bool(value == wanted)


def _is_near(value: Any, wanted: Any) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=FLOAT_TOLERANCE, abs_tol=1e-9)
    except TypeError:  # not both are numbers
        return False


def _send(pipe: BinaryIO, message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _receive(pipe: BinaryIO) -> dict[str, Any]:
    line = pipe.readline(MAX_MESSAGE_BYTES)
    if not line.endswith(b"\n"):
        os._exit(FAILED)  # the other side has ended or said too much: no test may catch this
    message: dict[str, Any] = json.loads(line)
    return message


ROLES: dict[str, Callable[[int, int, str], None]] = {
    "answers": answer_calls,
    "tests": run_tests,
    "calls": run_calls,
}
"""The function of a process by its role; called with its descriptors and the text to run."""
