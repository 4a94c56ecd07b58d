"""Lines that are redrawn in place, on a terminal of a few commands."""

import io
import re

from rich.console import Console
from rich.text import Text

from console.display.display import Screen


class Terminal(io.StringIO):
    """What a terminal would show: lines, and the commands that `Screen` uses; no others pass.

    A stand-in for a real one, which a test cannot read; `docs/watching.md` tells what it looked
    like in tmux.
    """

    def __init__(self):
        super().__init__()
        self.rows, self.row = [""], 0
        self.is_cursor_hidden = False
        self.written = []

    def write(self, text):
        self.written.append(text)
        for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
            if piece == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif piece == "\r":
                pass
            elif piece[0] != "\x1b":
                self.rows[self.row] = piece
            elif piece.endswith("A"):
                self.row = max(0, self.row - int(piece[2:-1]))
            elif piece == "\x1b[J":
                self.rows[self.row :] = [""]
            elif piece == "\x1b[H":
                self.row = 0
            elif piece in ("\x1b[?25l", "\x1b[?25h"):
                self.is_cursor_hidden = piece.endswith("l")
            else:
                assert piece.endswith("m") or piece == "\x1b[K", piece
        return len(text)

    @property
    def shown(self):
        return [row for row in self.rows if row]


def screen_on(terminal, **size):
    console = Console(
        file=terminal,
        force_terminal=True,
        color_system=None,
        **({"width": 40, "height": 10} | size),
    )
    return console, Screen(console)


def texts(*lines):
    return [Text(line) for line in lines]


def test_lines_are_replaced_where_they_stand():
    terminal = Terminal()
    console, screen = screen_on(terminal)
    console.print("before")

    with screen:
        assert terminal.is_cursor_hidden
        screen.draw(texts("one", "two", "three"))
        screen.draw(texts("one", "2"))

    assert terminal.shown == ["before", "one", "2"]
    assert not terminal.is_cursor_hidden


def test_only_what_differs_is_written_and_nothing_is_ever_blank():
    terminal = Terminal()
    _, screen = screen_on(terminal)
    screen.draw(texts("one", "two", "three"))

    terminal.written.clear()
    screen.draw(texts("one", "two", "three"))
    assert "".join(terminal.written) == ""

    screen.draw(texts("one", "2", "three"))
    (frame,) = filter(None, terminal.written)
    assert "one" not in frame
    assert "three" not in frame
    assert frame.index("2") < frame.index("\x1b[K"), "the old line is cleared behind the new one"
    assert frame.endswith("\x1b[J")
    assert terminal.shown == ["one", "2", "three"]


def test_an_event_is_printed_above_the_lines_and_stays():
    terminal = Terminal()
    console, screen = screen_on(terminal)
    screen.draw(texts("one", "two"))

    screen.print(lambda: console.print("actor-0 starts again"))
    screen.draw(texts("one", "2"))
    screen.draw(texts("1", "2"))

    assert terminal.shown == ["actor-0 starts again", "1", "2"]


def test_a_change_of_size_clears_the_screen_and_keeps_the_newest_events():
    terminal = Terminal()
    console, screen = screen_on(terminal)
    console.print("long before")
    screen.print(lambda: console.print("an event"))
    screen.draw(texts("one"))

    console.width = 30
    screen.draw(texts("1"))

    assert terminal.shown == ["an event", "1"]
