"""Compact prompts: an item of a reasoning-gym dataset in a handful of characters.

A character model spends most of its time on English questions of some hundred characters. A compact
style keeps all that the answer depends on, drops the prose, and maps the short answer back to the
form that the scorer of the dataset expects. Each is written by hand: no rule finds the payload of
every dataset.

| dataset | prompt | answer |
| --- | --- | --- |
| spell_backward | `abc>` | `cba` |
| number_sorting | `3,1,2<` ascending, `3,1,2>` descending | `1,2,3` |
| base_conversion | `101:2>10:` | `5` |
| caesar_cipher | `IFMMP>` | `HELLO` |
| count_bits | `13#` | `3` |
| gcd, lcm | `12,8:` | `4` |
| letter_counting | `e in the text:` | `2` |
| word_sorting | `b,a<` or `b,a>` | `a,b` |
| chain_sum, basic_arithmetic, products | `3+4=` | `7` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.errors import SettingsError

Item = dict[str, Any]
"""An item as reasoning-gym makes it: `question`, `answer`, `metadata`."""


def _same(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class CompactStyle:
    """Short prompts and answers of one dataset."""

    prompt: Callable[[Item], str]
    answer: Callable[[Item], str]
    expand: Callable[[str], str] = _same
    """From a short answer to the form that the dataset's scorer reads."""


def compact_style(dataset: str) -> CompactStyle:
    """Return the style of a dataset.

    Raises:
        SettingsError: None was written for it.
    """
    try:
        return STYLES[dataset]
    except KeyError:
        raise SettingsError(
            f"run.environment_settings.prompt_style must be full for {dataset}, got compact; "
            f"short prompts are written for {', '.join(sorted(STYLES))}"
        ) from None


def _plain_answer(item: Item) -> str:
    return str(item["answer"])


def _number(text: str) -> str:
    """Drop decimals without information: `7.0` is `7`."""
    return text.removesuffix(".0")


def _direction(item: Item) -> str:
    return "<" if item["metadata"]["direction"] == "ascending" else ">"


def _sorting_prompt(item: Item) -> str:
    numbers = item["metadata"]["original_numbers"]
    return ",".join(_number(n) for n in numbers) + _direction(item)


def _sorting_answer(item: Item) -> str:
    return ",".join(_number(n) for n in item["metadata"]["sorted_numbers"])


def _sorting_expand(text: str) -> str:
    return str(text.split(","))


def _conversion_prompt(item: Item) -> str:
    meta = item["metadata"]
    return f"{meta['source_repr']}:{meta['source_base']}>{meta['target_base']}:"


def _words_prompt(item: Item) -> str:
    return ",".join(item["metadata"]["transformed_words"]) + _direction(item)


def _words_answer(item: Item) -> str:
    return ",".join(item["metadata"]["sorted_words"])


def _counting_prompt(item: Item) -> str:
    meta = item["metadata"]
    return f"{meta['target_letter']} {' '.join(meta['span'])}:"


def _numbers_prompt(item: Item) -> str:
    return ",".join(str(n) for n in item["metadata"]["numbers"]) + ":"


def _expression_prompt(item: Item) -> str:
    return str(item["metadata"]["expression"]).replace(" ", "") + "="


_EXPRESSION = CompactStyle(_expression_prompt, _plain_answer)
STYLES = {
    # The scorer ignores case, so a lower-case word halves the alphabet and asks the same thing.
    "spell_backward": CompactStyle(
        lambda item: str(item["metadata"]["word"]).lower() + ">",
        lambda item: str(item["answer"]).lower(),
    ),
    "number_sorting": CompactStyle(_sorting_prompt, _sorting_answer, _sorting_expand),
    "base_conversion": CompactStyle(_conversion_prompt, _plain_answer),
    "caesar_cipher": CompactStyle(
        lambda item: str(item["metadata"]["cipher_text"]) + ">", _plain_answer
    ),
    "count_bits": CompactStyle(lambda item: f"{item['metadata']['number']}#", _plain_answer),
    "gcd": CompactStyle(_numbers_prompt, _plain_answer),
    "lcm": CompactStyle(_numbers_prompt, _plain_answer),
    "letter_counting": CompactStyle(_counting_prompt, _plain_answer),
    "word_sorting": CompactStyle(
        _words_prompt, _words_answer, lambda text: ", ".join(text.split(","))
    ),
    "chain_sum": _EXPRESSION,
    "basic_arithmetic": _EXPRESSION,
    "products": _EXPRESSION,
}
