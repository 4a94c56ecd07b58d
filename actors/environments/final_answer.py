r"""The final answer of a completion, without the reasoning, and its agreement with a reference.

The answer is the last `<answer>`, or else the last `\boxed{}`. Where a completion has neither, the
candidates are its whole text, its last line, and the part of that line that follows "the answer
is". Thinking, up to `</think>`, is cut off first; a completion that is still thinking has no
answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

FORMAT = "Put your final answer between <answer> and </answer>."
"""Sentence that tells a model how to answer."""

BOX = "\\boxed{"
ANSWER_IS = re.compile(r"\banswer\W*(?:is\b|:)", re.IGNORECASE)
FENCE = "```"


def candidates(text: str) -> tuple[str, ...]:
    r"""Return the candidates for the final answer, without repeats; the best of them counts.

    There are several only where nothing marks the answer: a grid has many lines, and a sum one.

    Example:
        >>> candidates("<think>8+8=16, less 1</think>So <answer>15</answer>.")
        ('15',)
        >>> candidates("8 and 7 make 15.\\nThe answer is 15.")[-1]
        '15'
    """
    rest, marked = without_thinking(text), marked_answer(text)
    if marked is not None:
        return (marked,)
    last = rest.rpartition("\n")[2].strip()
    return tuple(dict.fromkeys((rest, last, *_after_phrase(last))))


def marked_answer(text: str) -> str | None:
    r"""Return the text in the last `<answer>`, or else in the last `\boxed{}`; None without one."""
    rest = without_thinking(text)
    marked = _in_tags(rest) or _in_box(rest)
    return None if marked is None else marked.strip()


def without_thinking(text: str) -> str:
    """Return the text after `</think>`, which is empty while a completion is still thinking."""
    _, has_thought, rest = text.rpartition("</think>")
    return "" if not has_thought and "<think>" in text else rest.strip()


def fenced_blocks(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield language and text of each fenced block, and whether a fence closes it."""
    at = 0
    while (begin := text.find(FENCE, at)) >= 0:
        line = text.find("\n", begin)
        if line < 0:
            return
        language = text[begin + len(FENCE) : line].strip().partition(" ")[0]
        end = text.find(FENCE, line + 1)
        yield language, text[line + 1 : end if end >= 0 else len(text)], end >= 0
        if end < 0:
            return
        at = end + len(FENCE)


def _after_phrase(line: str) -> tuple[str, ...]:
    """Return the text after the last "the answer is" of a line."""
    end = max((said.end() for said in ANSWER_IS.finditer(line)), default=len(line))
    text = line[end:].lstrip(" \t:*").rstrip().removesuffix(".").rstrip(" \t*")
    return (text,) if text else ()


def _in_tags(text: str) -> str | None:
    _, tag, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0] if tag else None


def _in_box(text: str) -> str | None:
    _, box, rest = text.rpartition(BOX)
    if not box:
        return None
    depth = 1
    for at, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:at]
    return rest.rpartition("}")[0] or rest  # braces that do not match belong to the answer


# --------------------------------------------------------------------------------------------------
# Dense rewards: credit for a part of the answer, so that a policy that is never right learns.


def position_share(text: str, answer: str) -> float:
    """Share of positions at which `text` agrees with `answer`, over the longer one; 1 iff equal.

    Example:
        >>> position_share("cbx", "cba")
        0.6666666666666666
    """
    longest = max(len(text), len(answer))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longest
