"""Turns of the policy: the frame of a chat template around one, and strings that end one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from configs.errors import SettingsError, quoted

# --------------------------------------------------------------------------------------------------
# Frame that a chat template puts around the policy's turn, and faults that it can have.
#
# An opening such as `<|im_start|>assistant` follows the prompt; a closing such as `<|im_end|>`
# follows the answer.


class TurnFrame(NamedTuple):
    """The texts around an answer. Producer: `ModelTokenizer`."""

    opening: str
    """Text behind the prompt, where the policy goes on; may be empty."""
    unopened: str
    """Text before an answer of a conversation that is missing behind the prompt."""
    closing: str
    has_stop: bool
    """A stop token is in `closing`."""

    def check_opening(self) -> str:
        """Refuse a template whose prompts end before the policy's turn begins.

        Some templates, such as Mistral's, open no turn: answers follow the prompt.

        Returns:
            How a turn begins, in words for a report of checks.

        Raises:
            SettingsError: The prompts end too early.
        """
        if self.unopened:
            raise SettingsError(
                f"run.model must have a chat template that adds a generation prompt, got one that "
                f"ignores add_generation_prompt, so the policy itself would have to write "
                f"{quoted(self.unopened, 60)} before answers; put that text behind `{{% if "
                f"add_generation_prompt %}}` at the end of its chat_template"
            )
        return f"opens the turn with {self.opening!r}" if self.opening else "answers follow prompts"

    def check_closing(self, strings: Sequence[str]) -> str:
        """Refuse a template that ends turns with a text at which no policy stops.

        Args:
            strings: `run.stop`.

        Returns:
            How a turn ends, in words for a report of checks.

        Raises:
            SettingsError: The closing has neither a stop token nor one of the strings.
        """
        text = self.closing.strip()
        if text and not self.has_stop and not any(stop in self.closing for stop in strings):
            raise SettingsError(
                f"run.model must have a chat template that ends turns with a stop token, got one "
                f"that ends them with {quoted(text, 60)}, at which the policy would not stop; set "
                f"run.stop: [{text.split()[0]!r}], or make it a special token of the tokenizer"
            )
        return f"ends it with {text!r}" if text else "ends it with the end-of-sequence token"


# --------------------------------------------------------------------------------------------------
# Strings that end a turn: the token that completes one is the turn's last.
#
# The same for every engine, and again when an episode is continued: a turn ends after the first
# token with which its text has one of the strings. Only the last tokens of a turn are decoded each
# time.

SPARE_TOKENS = 8  # of no text of their own, or parts of a character


class StopStrings:
    """The strings of a run that end a turn.

    Example:
        >>> stops = StopStrings(["ab"], "".join)
        >>> stops.find_end("xabz"), stops.cut("xab")
        (3, 'x')
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Keep the strings and a function that decodes tokens.

        Args:
            strings: At least one.
            decode: Text of tokens.
        """
        self.strings = tuple(strings)
        self._decode = decode
        # Every token that counts has at least one byte.
        self.window = max(len(text.encode()) for text in strings) + SPARE_TOKENS

    def find_end(self, token_ids: Sequence[int], start: int = 0) -> int | None:
        """Return the number of tokens with which a string is first complete; None if none is.

        Args:
            token_ids: Tokens of a turn.
            start: Tokens that were searched before; only strings that end behind them count.
        """
        if not self._has_one(token_ids[max(0, start + 1 - self.window) :]):
            return None
        ends = range(start + 1, len(token_ids) + 1)
        return next(
            (n for n in ends if self._has_one(token_ids[max(0, n - self.window) : n])), None
        )

    def cut(self, text: str) -> str:
        """Return the text before the first of the strings."""
        return before(self.strings, text)

    def _has_one(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(stop in text for stop in self.strings)


def before(strings: Sequence[str], text: str) -> str:
    """Return the text before the first of the strings in it."""
    starts = [text.index(stop) for stop in strings if stop in text]
    return text[: min(starts, default=len(text))]


class TurnWatch:
    """A turn that is searched for stop strings as its tokens come."""

    def __init__(self, stops: StopStrings, turn: Sequence[int]) -> None:
        self._stops = stops
        self._tail = list(turn[-stops.window :])

    def scan_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Take new tokens; return how many of them belong to the turn if it is over, else None."""
        num_before = len(self._tail)
        token_ids = [*self._tail, *token_ids]
        end = self._stops.find_end(token_ids, num_before)
        self._tail = token_ids[-self._stops.window :]
        return None if end is None else end - num_before
