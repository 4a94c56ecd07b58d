"""A reward that differs from answer to answer, so that every batch has a loss."""

from __future__ import annotations


def early_letters(completions: list[str], **_: object) -> list[float]:
    """Share of the letters in the first half of the alphabet."""
    return [
        sum("a" <= letter <= "m" for letter in text) / max(1, len(text)) for text in completions
    ]
