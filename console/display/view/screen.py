"""Lines at the bottom of a terminal that are redrawn in place: without flicker, without scrolling.

Only lines that differ are written, over the old ones, so that nothing is ever blank in between.
Above them stays what was there before, and what `print` adds. After a change of the terminal's size
the screen is cleared, because nobody knows how it has broken the old lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CLEAR_SCREEN = "\x1b[H\x1b[J"
CLEAR_BELOW, CLEAR_LINE_END = "\x1b[J", "\x1b[K"
KEPT_PRINTS = 20  # after a change of size


class Screen:
    """The lines that a program owns on a terminal.

    Example:
        with screen:
            screen.draw(lines)
            screen.print(lambda: console.print("an event"))
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn: list[str] = []
        self._size = console.size
        self._prints: deque[Callable[[], None]] = deque(maxlen=KEPT_PRINTS)

    def __enter__(self) -> Screen:
        self._write(HIDE_CURSOR)
        return self

    def __exit__(self, *_: object) -> None:
        self._write(SHOW_CURSOR)

    def draw(self, lines: Sequence[Text]) -> None:
        """Replace the lines; all that is drawn must fit the terminal."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._write(CLEAR_SCREEN)
            self._drawn = []
            for each in self._prints:
                each()
        new = [self._encoded(line) for line in lines]
        if new == self._drawn:
            return
        out = f"\r\x1b[{len(self._drawn)}A" if self._drawn else "\r"
        for at, line in enumerate(new):
            is_same = at < len(self._drawn) and self._drawn[at] == line
            out += "\n" if is_same else f"{line}{CLEAR_LINE_END}\n"
        self._write(out + CLEAR_BELOW)
        self._drawn = new

    def print(self, output: Callable[[], None]) -> None:
        """Print above the lines, which are drawn again by the next `draw`."""
        if self._drawn:
            self._write(f"\r\x1b[{len(self._drawn)}A{CLEAR_BELOW}")
            self._drawn = []
        self._prints.append(output)
        output()

    def _encoded(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="crop", highlight=False)
        return captured.get()

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
