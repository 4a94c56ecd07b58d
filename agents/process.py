"""The process of an agent: its command, environment, limits, and the end of its output.

The command runs under a keeper and its guard (`keeper.py`), in a folder that is removed with them.
Its memory is the resident memory of all processes that descend from it, measured once a second. A
limit on address space (RLIMIT_AS) would not do: it counts what runtimes such as V8 and Go reserve
and never use, tens of gigabytes, and it holds for each process alone, of which an agent may start
any number. A process may exceed the limit between two measurements.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from broker.protocol.conversation_messages import Ending
from broker.protocol.messages import MAX_REASON
from configs.errors import SettingsError, printable_lines
from configs.settings import AgentSettings
from configs.user_python import command_words

from .conversation import AgentEnd
from .keeper import KILLED_S, NOT_STARTED, descendants, parents_of_processes, remove

KEEPER = Path(__file__).with_name("keeper.py")
MEASURE_S = 1.0
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL, for an agent that has had its time or memory."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OUR_VARIABLES = "NYALA_"
"""Begin of the names of variables that may hold a run's secrets, which agents do not get."""


def command_of(agents: AgentSettings, python: Path | None) -> tuple[str, ...]:
    """Return the words of `agents.command`, with the files that they name absolute.

    Args:
        agents: Settings of agents.
        python: Python of a virtual environment for it; None = as the words say.

    Raises:
        SettingsError: It cannot be split into words, or there are none.
    """
    words = command_words(agents, python)
    if not words:
        raise SettingsError(
            "agents.command must be the command of an agent, got none; set it, such as "
            "agents.command='python my_agent.py', or start agents by hand with --print"
        )
    return words


def environment_of(
    url: str, key: str, task: bytes, *, python: Path | None, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of an agent that holds one conversation.

    Args:
        url: Address of its conversation.
        key: Key of its conversation.
        task: What it is asked, JSON.
        python: Python of a virtual environment for it.
        inherited: Variables of the host.
    """
    return shared_environment(url, python=python, inherited=inherited) | {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "NYALA_TASK": task.decode(errors="replace"),
    }


def shared_environment(
    url: str, *, python: Path | None, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of an agent that holds many conversations.

    Args:
        url: An address of the door, which clients then ask without a proxy.
        python: Python of a virtual environment for it.
        inherited: Variables of the host.
    """
    variables = {
        name: value for name, value in inherited.items() if not name.startswith(OUR_VARIABLES)
    }
    host = urlsplit(url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        variables[name] = ",".join(filter(None, [variables.get(name), host]))
    if python is not None:
        variables["PATH"] = os.pathsep.join(
            filter(None, [str(python.parent), variables.get("PATH")])
        )
        variables["VIRTUAL_ENV"] = str(python.parent.parent)
    return variables


class MemoryMeter:
    """Measures memory of agents; all agents of a host share one look at the list of processes."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._looked_at = -MEASURE_S

    async def resident_bytes(self, root: int) -> int:
        """Return the resident memory of all processes below the keeper of a guard."""
        if time.monotonic() - self._looked_at >= MEASURE_S:
            self._looked_at = time.monotonic()
            self._parents = await asyncio.to_thread(parents_of_processes)
        keepers = [pid for pid, parent in self._parents.items() if parent == root]
        agent = set[int]().union(*(descendants(pid, self._parents) for pid in keepers))
        return sum(map(_resident_bytes, agent))


class AgentProcess:
    """One run of an agent's command.

    Args:
        command: Words of the command.
        environment: Its environment variables.
        timeout_s: Longest time that it may take.
        memory_bytes: Most memory that it may have; None = no limit.
        meter: Meter of the host.
        stdin: Open file that becomes its standard input, and is closed here; None = no input.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        timeout_s: float,
        memory_bytes: int | None,
        meter: MemoryMeter,
        stdin: int | None = None,
    ) -> None:
        self._command, self._environment, self._stdin = command, environment, stdin
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes
        self._tail = bytearray()
        self._meter, self._used_bytes = meter, 0

    async def run(self, told: asyncio.Event) -> AgentEnd:
        """Run the command to its end; return why its conversation ends.

        Args:
            told: Ends the process when it is set; the conversation has ended already.

        Raises:
            OSError: It cannot be started.
        """
        try:
            folder = tempfile.mkdtemp(prefix="nyala-agent-")
            try:
                process = await self._start(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        finally:
            if self._stdin is not None:
                os.close(self._stdin)
        assert process.stdin is not None and process.stdout is not None
        reading = asyncio.create_task(self._read(process.stdout))
        ended = asyncio.create_task(process.wait())
        why: Ending = "host"
        try:
            why = await self._watch(process.pid, ended, told)
        finally:
            process.stdin.close()  # the keeper ends what remains
            await self._until_ended(process.pid, ended)
            await asyncio.wait({reading}, timeout=GRACE_S)  # all that could write have ended
            reading.cancel()
            await asyncio.to_thread(remove, folder)
        return self._end(why, process.returncode or 0)

    async def _start(self, folder: str) -> asyncio.subprocess.Process:
        stdin = -1 if self._stdin is None else self._stdin
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(KEEPER), folder, str(GRACE_S), str(stdin)),
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            pass_fds=() if self._stdin is None else (self._stdin,),
            start_new_session=True,  # Ctrl-C is for the host
        )

    async def _watch(self, pid: int, ended: asyncio.Task[int], told: asyncio.Event) -> Ending:
        deadline = time.monotonic() + self._timeout_s
        stopping = asyncio.create_task(told.wait())
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                done, _ = await asyncio.wait(
                    {ended, stopping},
                    timeout=min(left_s, MEASURE_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if done:
                    return "ended"
                if self._memory_bytes is None:
                    continue
                self._used_bytes = await self._meter.resident_bytes(pid)
                if self._used_bytes > self._memory_bytes:
                    return "memory"
            return "timeout"
        finally:
            stopping.cancel()

    async def _until_ended(self, pid: int, ended: asyncio.Task[int]) -> None:
        """Wait for the keeper's end; one that was stopped goes on, and has its time once more."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            done, _ = await asyncio.wait({ended}, timeout=GRACE_S + 3 * KILLED_S)
            if done:
                return
            for process in {*descendants(pid, parents_of_processes()), pid}:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, number)
        await asyncio.wait({ended}, timeout=KILLED_S)

    def _end(self, why: Ending, code: int) -> AgentEnd:
        output = printable_lines(self._tail.decode(errors="replace"))[-MAX_REASON:]
        if code == -NOT_STARTED:
            raise OSError(output.strip())
        if why == "timeout":
            return AgentEnd("timeout", _with(f"no end within {self._timeout_s:g} s", output))
        if why == "memory":
            mib = self._used_bytes // 2**20
            return AgentEnd("memory", _with(f"it used {mib} MiB", output))
        if code:
            how = f"exit code {code}" if code > 0 else f"its keeper ended by signal {-code}"
            return AgentEnd("died", _with(how, output))
        return AgentEnd("ended")

    async def _read(self, output: asyncio.StreamReader) -> None:
        while part := await output.read(65_536):
            self._tail += part
            del self._tail[: -4 * MAX_REASON]


class SharedProcess:
    """One run of a command for all conversations of a host, each a line of its standard input.

    It is started with a conversation, and once more with the next one after it has ended.

    Args:
        make: Makes the process, with an open file as its standard input.
    """

    def __init__(self, make: Callable[[int], AgentProcess]) -> None:
        self._make = make
        self._running: asyncio.Task[AgentEnd] | None = None
        self._lines: asyncio.WriteTransport | None = None
        self._starting, self._told = asyncio.Lock(), asyncio.Event()

    async def hold(self, line: str, over: asyncio.Event, *, timeout_s: float) -> AgentEnd:
        """Give it a conversation; return why that ends.

        Args:
            line: The conversation.
            over: Set when the conversation has ended.
            timeout_s: Longest time that it may take.
        """
        running = await self._tell(line)
        ending = asyncio.create_task(over.wait())
        try:
            await asyncio.wait(
                {running, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ending.cancel()
        if over.is_set():
            return AgentEnd("ended")
        if not running.done():
            return AgentEnd("timeout", f"no end within {timeout_s:g} s")
        end = running.result()
        if end.why == "ended":
            return AgentEnd("died", "it exited, with code 0, before it ended its conversations")
        return end

    async def close(self) -> None:
        """End the process, if there is one."""
        self._told.set()
        if self._running is not None:
            await asyncio.wait({self._running})
        if self._lines is not None:
            self._lines.close()

    async def _tell(self, line: str) -> asyncio.Task[AgentEnd]:
        async with self._starting:
            if self._running is not None and self._lines is not None and self._lines.is_closing():
                await asyncio.wait({self._running})  # what it has begun is being ended
            if self._running is None or self._running.done():
                if self._lines is not None:
                    self._lines.close()
                reader, writer = os.pipe()
                self._lines, _ = await asyncio.get_running_loop().connect_write_pipe(
                    asyncio.Protocol, os.fdopen(writer, "wb")
                )
                self._running = asyncio.create_task(self._make(reader).run(self._told))
            assert self._lines is not None
            self._lines.write(f"{line}\n".encode())
            return self._running


def _with(reason: str, output: str) -> str:
    text = f"{reason}; its last output:\n" if output else reason
    return text + output[len(text) - MAX_REASON :] if output else text


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE_BYTES
    except OSError:  # it has just ended
        return 0
