"""A connection between the launchers of two machines: JSON objects, one a line, and signs of life.

It neither authenticates nor encrypts, as the process groups that it prepares.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

ALIVE_S = 1.0
SILENT_S = 15.0
"""After which a machine counts as gone: a switch that starts again is not worth a restart."""
SEND_S = 5.0
END_S = 10.0  # the other side may wait for its ranks to end
LONGEST_LINE = 4096


class Lost(Exception):
    """The other side is gone, silent, or no launcher."""


class Lines:
    """One end of a connection; `receive` is called several times a second."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = b""
        self._is_closed = False
        """The other side sends nothing more."""
        self._heard_at = self._sent_at = time.monotonic()

    @property
    def own_address(self) -> str:
        """Address of this machine on the way to the other."""
        return str(self._socket.getsockname()[0])

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            Lost: The other side is gone.
        """
        self._sent_at = time.monotonic()
        try:
            self._socket.settimeout(SEND_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self) -> list[dict[str, Any]]:
        """Take the messages that have arrived, without waiting, and give a sign of life.

        Raises:
            Lost: The other side is gone, has been silent for long, or sends something else.
        """
        if time.monotonic() - self._sent_at > ALIVE_S and not self._is_closed:
            self.send()
        try:
            self._socket.settimeout(0.0)
            while chunk := self._socket.recv(LONGEST_LINE):
                self._received += chunk
                self._heard_at = time.monotonic()
                if len(self._received) > LONGEST_LINE:
                    break
            else:
                self._is_closed = True
        except BlockingIOError:
            pass
        except OSError as error:
            raise Lost(str(error)) from error
        if time.monotonic() - self._heard_at > SILENT_S:
            raise Lost(f"it has been silent for {SILENT_S:.0f} s")
        messages = self._messages()
        if self._is_closed and not messages:
            raise Lost("it has closed the connection")
        return messages

    def end(self) -> None:
        """End the connection once the other side has, so that it reads what was sent last."""
        deadline = time.monotonic() + END_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(END_S)
            while self._socket.recv(LONGEST_LINE) and time.monotonic() < deadline:
                pass
        self.close()

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _messages(self) -> list[dict[str, Any]]:
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise Lost("it is no launcher of a learner") from error
        if len(self._received) > LONGEST_LINE or not all(isinstance(m, dict) for m in messages):
            raise Lost("it is no launcher of a learner")
        return [message for message in messages if message]
