"""Frame that a chat template puts around the policy's turn, and faults that it can have.

An opening such as `<|im_start|>assistant` follows the prompt; a closing such as `<|im_end|>`
follows the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from configs.errors import SettingsError


class TurnFrame(NamedTuple):
    """The texts around an answer. Producer: `ModelTokenizer`."""

    opening: str
    """Behind the prompt, where the policy goes on; empty where prompts end as they are."""
    unopened: str
    """Before an answer of a conversation, and not behind the prompt."""
    closing: str
    has_stop: bool
    """A stop token is in `closing`."""

    def check_opening(self) -> str:
        """Refuse a template whose prompts end before the policy's turn begins.

        Some templates, such as Mistral's, open no turn: answers follow the prompt.

        Raises:
            SettingsError: It is one.
        """
        if self.unopened:
            raise SettingsError(
                f"run.model must have a chat template that adds a generation prompt, got one that "
                f"ignores add_generation_prompt, and writes {self.unopened!r:.60} before answers: "
                f"the policy would have to write that itself; put it behind `{{% if "
                f"add_generation_prompt %}}` at the end of its chat_template"
            )
        return f"opens the turn with {self.opening!r}" if self.opening else "answers follow prompts"

    def check_closing(self, strings: Sequence[str]) -> str:
        """Refuse a template that ends turns with what stops no policy.

        Args:
            strings: `run.stop`.

        Raises:
            SettingsError: It does.
        """
        text = self.closing.strip()
        if text and not self.has_stop and not any(each in self.closing for each in strings):
            raise SettingsError(
                f"a stop token of run.model must end its turns, got {text!r:.60} from its chat "
                f"template, in which there is none; set run.stop: [{text.split()[0]!r}], or make "
                f"it a special token of the tokenizer"
            )
        return f"ends it with {text!r}" if text else "ends it with the end-of-sequence token"
