"""Limits of the episodes of one run: its vocabulary, and the lengths of prompts and completions.

`rules.py` refuses records that are not well-formed in any run; these limits refuse what no actor of
this run can have sampled. The broker applies them to what arrives, an actor to what it resumes, and
the learner to what it trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.errors import RecordError
from configs.settings import RunSettings

from .episode import Episode

MAX_VOCABULARY = 2**31
"""Of token ids that are int32: as good as no limit."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds of an episode; the defaults are those of any run."""

    vocabulary: int = MAX_VOCABULARY
    """Tokens of the policy's model, known once the learner has loaded it."""
    max_prompt_tokens: int = MAX_VOCABULARY
    max_completion_tokens: int = MAX_VOCABULARY
    """All turns and the environment's tokens together."""

    @classmethod
    def of(cls, run: RunSettings, *, vocabulary: int | None) -> EpisodeLimits:
        """Return the limits of a run; a vocabulary that is not known yet bounds nothing."""
        known = MAX_VOCABULARY if vocabulary is None else vocabulary
        return cls(known, run.max_prompt_tokens, run.max_completion_tokens)

    def check_episode(self, episode: Episode) -> None:
        """Refuse an episode that is beyond any of the limits; raises as `check_prompt`."""
        prompt, completion = episode.prompt_ids, episode.completion.token_ids
        self.check_prompt(len(prompt))
        self.check_completion(len(completion))
        self.check_token(int(max(prompt.max(), completion.max())))

    def check_token(self, largest: int) -> None:
        """Refuse the largest token id of an episode; raises as `check_prompt`."""
        if largest >= self.vocabulary:
            raise RecordError(
                f"token ids must be below the vocabulary of run.model = {self.vocabulary}, got "
                f"{largest}; the tokenizer or the model of its actor is another one"
            )

    def check_prompt(self, length: int) -> None:
        """Refuse a prompt that is too long.

        Raises:
            RecordError: names the setting, its value and what was found.
        """
        if length > self.max_prompt_tokens:
            raise RecordError(
                f"a prompt must be at most run.max_prompt_tokens = {self.max_prompt_tokens}, got "
                f"{length} tokens; its actor runs with other settings"
            )

    def check_completion(self, length: int) -> None:
        """Refuse a completion, finished or not, that is too long; raises as `check_prompt`."""
        if length > self.max_completion_tokens:
            raise RecordError(
                f"a completion must be at most run.max_completion_tokens = "
                f"{self.max_completion_tokens}, got {length} tokens; its actor runs with other "
                "settings"
            )


ANY_RUN = EpisodeLimits()
