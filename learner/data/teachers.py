"""Teachers of on-policy distillation: the tokenizer that they must have, and what only they read.

Policy and teacher score the same token ids, so each id must mean the same to both. `batch.py` packs
what a teacher reads; its log-probs become advantages in `learner/training/preparation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from buffer.record.episode import Episode, Int32
from configs.architecture import present_model
from configs.errors import SettingsError
from configs.settings import RunSettings, Settings
from configs.user_code import explain, load_user_code

from .batch import TeacherPrompt, prompt_of_episode

KEPT_MESSAGES = 4096
"""Texts whose tokens are kept: those of the prompts of a batch, each of which is of a group."""


def check_tokenizer(run: RunSettings, teacher: str) -> str:
    """Refuse a teacher whose tokenizer is not that of the run's model.

    Args:
        run: Settings of the run; its model is there.
        teacher: Directory or hub name of the teacher.

    Returns:
        What both have in common, and where they end a text differently.

    Raises:
        SettingsError: There is no tokenizer, or a token differs.
    """
    ours = _load(present_model(run), setting="run.model")
    theirs = _load(teacher, setting="algorithm.teacher")
    if difference := _first_difference(ours, theirs):
        raise SettingsError(
            f"algorithm.teacher must have the tokenizer of run.model, got {teacher}, {difference}; "
            "choose a teacher of the same family"
        )
    same = f"{len(ours)} tokens, as run.model has them"
    if ours.eos_token == theirs.eos_token:
        return same
    ends = f"its texts end with {theirs.eos_token!r}, those of run.model with {ours.eos_token!r}"
    return f"{same}; {ends}"


def _first_difference(ours: Any, theirs: Any) -> str:
    """Name the first token that differs; empty = none does."""
    one, other = (
        {number: text for text, number in tokenizer.get_vocab().items()}
        for tokenizer in (ours, theirs)
    )
    for number in sorted(one.keys() | other.keys()):
        if one.get(number) != other.get(number):
            return f"whose token {number} is {_named(other, number)}, not {_named(one, number)}"
    special, others = (
        {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        for tokenizer in (ours, theirs)
    )
    for number in sorted(special ^ others):
        kinds = ("plain", "special") if number in special else ("special", "plain")
        return f"whose token {number}, {_named(one, number)}, is {kinds[0]}, not {kinds[1]}"
    return ""


def _named(vocabulary: dict[int, str], number: int) -> str:
    return repr(vocabulary[number]) if number in vocabulary else "missing"


def _load(model: str, *, setting: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model, mistral_format=False)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{setting} must have a tokenizer, got {model!r} ({str(error).splitlines()[0]}); "
            "correct the name, or save the tokenizer beside the model"
        ) from error


def teacher_prompt_of(settings: Settings) -> TeacherPrompt:
    """Return what teachers read before a completion, as `algorithm.teacher_prompt` says.

    Raises:
        SettingsError: The function cannot be loaded, or the chat template takes no such message.
    """
    text = settings.algorithm.teacher_prompt
    if text is None:
        return prompt_of_episode
    return PrivilegedPrompt(settings.run, text)


class PrivilegedPrompt:
    """The prompt of an episode behind a system message that its policy did not read."""

    def __init__(self, run: RunSettings, text: str) -> None:
        """Load the tokenizer, and the function if there is one.

        Args:
            run: Settings of the run; its model is there.
            text: `algorithm.teacher_prompt`.

        Raises:
            SettingsError: As `teacher_prompt_of`.
        """
        self._tokenizer = _load(present_model(run), setting="run.model")
        self._variables = run.chat_template_kwargs
        self._text = text
        self._begin = self._find_begin()
        self._message = lru_cache(KEPT_MESSAGES)(self._encode)
        self._function: Callable[..., object] | None = None
        if text.rpartition(":")[0].endswith(".py"):
            self._function = load_user_code(
                text, setting="algorithm.teacher_prompt", kind="function"
            )

    def __call__(self, episode: Episode) -> Int32:
        """Return the tokens that a teacher reads before an episode's completion."""
        message, prompt = self._message(self._text_for(episode)), episode.prompt_ids
        if self._begin is not None and prompt[0] == self._begin:
            message = message[1:] if message[:1] == (self._begin,) else message
            return np.concatenate([prompt[:1], np.array(message, dtype=np.int32), prompt[1:]])
        return np.concatenate([np.array(message, dtype=np.int32), prompt])

    def _find_begin(self) -> int | None:
        """Find the token that begins a text and no later message; None = there is none.

        Raises:
            SettingsError: The chat template takes no system message.
        """
        begin, number = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        if self._tokenizer.chat_template is not None:
            alone = self._render("first")
            whole = self._render("first", {"role": "user", "content": "second"})
            if begin is not None and whole.removeprefix(alone).startswith(begin):
                return None  # it begins each message
        return None if number is None else int(number)

    def _text_for(self, episode: Episode) -> str:
        if self._function is None:
            return self._text
        try:
            text = self._function(
                prompt=self._decode(episode.prompt_ids),
                completion=self._decode(episode.completion.token_ids),
                answer=episode.metadata.get("answer", ""),
            )
        except Exception as error:
            raise SettingsError(
                f"algorithm.teacher_prompt must return a text for each episode, got "
                f"{explain(error)}; mend {self._text}"
            ) from error
        if not isinstance(text, str):
            raise SettingsError(
                f"algorithm.teacher_prompt must return a text for each episode, got "
                f"{type(text).__name__}; mend {self._text}"
            )
        return text

    def _decode(self, token_ids: Int32) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a system message, or of the bare text without a chat template."""
        if text and self._tokenizer.chat_template is not None:
            text = self._render(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, text: str, *others: dict[str, str]) -> str:
        """Write a system message, and others behind it, in the chat template."""
        messages = [{"role": "system", "content": text}, *others]
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, **self._variables
            )
        except Exception as error:
            raise SettingsError(
                "algorithm.teacher_prompt must be null where the chat template of run.model takes "
                f"no system message by itself, got an error ({error}); leave it out, or take a "
                "model whose template does"
            ) from error
        if text.strip() not in rendered:
            raise SettingsError(
                "algorithm.teacher_prompt must be null where the chat template of run.model leaves "
                f"a system message out, got {self._text!r}; leave it out, or take a model whose "
                "template keeps it"
            )
        return str(rendered)
