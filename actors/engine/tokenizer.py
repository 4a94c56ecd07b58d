"""Tokenizer of the run's model: text to tokens and back.

A chat model gets the prompt as its template's first user turn, and observations as further ones; a
character model gets the bare text. Loads transformers only when a tokenizer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from configs.errors import SettingsError


class Tokenizer(Protocol):
    """Interface of a tokenizer, as the episode loop uses it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Tokens of the prompt, up to where the policy begins its turn."""
        ...

    def encode_observation(self, text: str) -> tuple[int, ...]:
        """Tokens between a turn's end token and the policy's next turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of one turn, without its end token."""
        ...


class ModelTokenizer:
    """The tokenizer that lies beside the model's weights."""

    def __init__(self, model_path: str) -> None:
        """Load it.

        Raises:
            SettingsError: There is no tokenizer, or it has no end-of-sequence token.
        """
        from transformers import AutoTokenizer  # noqa: PLC0415 - transformers

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            advice = (
                "check the name, or that the machine can reach the hub"
                if not Path(model_path).is_dir()
                else "a folder made by `nyala init-model` has a tokenizer"
            )
            raise SettingsError(
                f"run.model must be a model with a tokenizer, got {model_path!r} "
                f"({reason}); {advice}"
            ) from error
        if tokenizer.eos_token_id is None:
            raise SettingsError(
                f"run.model must have a tokenizer with an end-of-sequence token, "
                f"got {model_path!r}; without one no turn ever ends"
            )
        self._tokenizer = tokenizer
        # Kept: every turn needs it, and the tokenizer searches for it each time.
        self._stop_token_ids = (int(tokenizer.eos_token_id),)
        self._chat = tokenizer.chat_template is not None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token."""
        return self._stop_token_ids

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Tokens of the prompt, in the chat template where there is one."""
        return self._encode(self._render([_user(text)]) if self._chat else text)

    def encode_observation(self, text: str) -> tuple[int, ...]:
        """Tokens of an observation, as the template's next user turn where there is one."""
        if not self._chat:
            return self._encode(text)
        # The template shows which tokens stand between a turn's end token and the next turn.
        turns = [_user("q"), {"role": "assistant", "content": "a"}, _user(text)]
        head, end, _ = self._render(turns[:2], go_on=False).rpartition(self._tokenizer.eos_token)
        return self._encode(self._render(turns)[len(head + end) :])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of one turn; special tokens stay visible, so that none can hide in an answer."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, turns: list[dict[str, str]], *, go_on: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=go_on
        )
        return text


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
