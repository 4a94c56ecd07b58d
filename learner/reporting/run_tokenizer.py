"""The tokenizer of the run's model, as rank 0 reads texts with it."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoTokenizer

from configs.architecture import present_model
from configs.settings import RunSettings

from .advice.gathering import NO_VOCABULARY, Vocabulary


def run_tokenizer(run: RunSettings) -> Any:
    """Load it, once for a process.

    Raises:
        OSError: There is none.
        ValueError: It cannot be read.
    """
    return _load(present_model(run))


def run_vocabulary(run: RunSettings) -> Vocabulary:
    """Return what the advisor looks for among tokens; nothing for a model without a tokenizer."""
    try:
        tokenizer = run_tokenizer(run)
    except (OSError, ValueError):
        return NO_VOCABULARY
    added = tokenizer.added_tokens_decoder.items()
    return Vocabulary(
        special={token_id: token.content for token_id, token in added if token.special},
        end=tokenizer.eos_token_id,
        is_blank=lambda token_id: not tokenizer.decode([token_id]).strip(),
        stop=run.stop,
        decode=lambda token_ids: str(
            tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        ),
    )


@cache
def _load(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path, mistral_format=False)
