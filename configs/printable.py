r"""Text from elsewhere, with what a terminal would obey written out.

Names, reasons and errors may come from another machine: control characters, escape sequences and
marks that turn the direction of writing are shown as `\x1b` or `\u202e`, never sent on.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return one line of it; line ends are written out too.

    Example:
        >>> printable("red \x1b[31m")
        'red \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return it with its lines."""
    return "\n".join(printable(line) for line in text.split("\n"))
