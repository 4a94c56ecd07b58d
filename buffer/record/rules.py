"""Rules of a record that its schema cannot state: parts that agree, valid numbers, limits of a run.

Numbers of several records are checked together: a call of numpy costs more than its work on one
completion, and a broker validates every episode of the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from configs.errors import RecordError
from configs.settings import RunSettings

from .episode import KEYS_PER_TOKEN, Attachment, Branch, Episode, attended_keys
from .wire import CompletionExtras, CompletionFields, EpisodeExtras, EpisodeFields, refusal

# --------------------------------------------------------------------------------------------------
# Limits of the episodes of one run: its vocabulary, and the lengths of prompts and completions.
#
# The rules below refuse records that are malformed in any run; these limits refuse records that no
# actor of this run can have sampled. The broker applies them to records that arrive, an actor to
# episodes that it resumes, and the learner to episodes that it trains.

MAX_VOCABULARY = 2**31
"""Number of token ids that fit into int32, which stands for no limit."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds of an episode; the defaults are those of any run."""

    vocabulary: int = MAX_VOCABULARY
    """Tokens of the policy's model, known once the learner has loaded it."""
    max_prompt_tokens: int = MAX_VOCABULARY
    max_completion_tokens: int = MAX_VOCABULARY
    """All turns, branches and tokens of the environment together."""
    may_branch: bool = True

    @classmethod
    def for_run(cls, run: RunSettings, *, vocabulary: int | None) -> EpisodeLimits:
        """Return the limits of a run; a vocabulary that is not known yet bounds nothing.

        Only live agents let a completion branch; elsewhere branches are refused.
        """
        bound = MAX_VOCABULARY if vocabulary is None else vocabulary
        return cls(
            bound, run.max_prompt_tokens, run.max_completion_tokens, may_branch=run.has_agents
        )

    def check_episode(self, episode: Episode) -> None:
        """Refuse an episode that is beyond any of the limits; raises as `check_prompt`."""
        prompt, completion = episode.prompt_ids, episode.completion.token_ids
        self.check_prompt(len(prompt))
        self.check_completion(episode.completion.branches, len(completion))
        self.check_token(int(max(prompt.max(), completion.max())))

    def check_token(self, largest: int) -> None:
        """Refuse the largest token id of an episode; raises as `check_prompt`."""
        if largest >= self.vocabulary:
            raise RecordError(
                f"token ids must be below the vocabulary of run.model = {self.vocabulary}, got "
                f"{largest}; its actor uses another tokenizer or model than the run"
            )

    def check_prompt(self, length: int) -> None:
        """Refuse a prompt that is too long.

        Raises:
            RecordError: The prompt is too long; the text names setting, value and length.
        """
        if length > self.max_prompt_tokens:
            raise RecordError(
                f"a prompt must be at most run.max_prompt_tokens = {self.max_prompt_tokens}, got "
                f"{length} tokens; its actor runs with other settings"
            )

    def check_completion(self, branches: Sequence[Branch], length: int) -> None:
        """Refuse a completion, finished or not, that is too long; raises as `check_prompt`.

        Of a chunk that is not the first the tokens before it are not counted.
        """
        if branches and not self.may_branch:
            raise RecordError(
                f"a completion must have no branches unless run.environment is agent, got "
                f"{len(branches)}; its actor runs with other settings"
            )
        self.check_log(length)

    def check_log(self, length: int) -> None:
        """Refuse a completion of too many tokens, all branches together; raises as above."""
        if length > self.max_completion_tokens:
            raise RecordError(
                f"a completion must be at most run.max_completion_tokens = "
                f"{self.max_completion_tokens}, got {length} tokens; its actor runs with other "
                "settings"
            )


ANY_RUN = EpisodeLimits()


# --------------------------------------------------------------------------------------------------
# Rules of a record that its schema cannot state: parts that agree, and valid numbers.

MAX_LOGPROB = 1e-2  # nats; above 0 only by rounding
MAX_EXPERT_BYTES = 4096  # of one token: 128 layers with 16 experts of two bytes each

# The methods `min` and `max` of an array call these from Python, and are three times as slow.
_min, _max = np.minimum.reduce, np.maximum.reduce


def check_episode(fields: EpisodeFields) -> None:
    """Refuse an episode whose parts do not agree; numbers in its arrays are not checked.

    Raises:
        RecordError: Parts disagree; the text names the field, the rule and the value.
    """
    if not fields.prompt:
        raise RecordError("prompt_ids must not be empty, got 0 tokens; the record is refused")
    if len(fields.prompt) % 4:
        raise _refusal_of_bytes("prompt_ids", fields.prompt)
    check_completion(fields.completion)
    if not fields.completion.mask:
        raise RecordError("token_ids must not be empty, got 0 tokens; there is nothing to train on")
    times = fields.started, fields.finished
    reals = (fields.reward, *times, *fields.parts.values(), *fields.metrics.values())
    if set(map(type, reals)) != {float} or not all(map(math.isfinite, reals)):
        raise refusal(fields, EpisodeFields, "its numbers must be finite floats")
    if not "".join([fields.inc, *fields.parts, *fields.metrics, *fields.text]).isprintable():
        raise refusal(fields, EpisodeFields, "its names must be printable")
    if fields.completion.branches:
        check_log(fields.completion.branches)
        _check_keys(fields)
    if fields.extras is not None:
        _check_extras(fields.extras, len(fields.prompt) // 4, len(fields.completion.mask))


def check_completion(fields: CompletionFields) -> None:
    """Refuse a completion, or a chunk of one, whose parts do not agree; raises as above."""
    length = len(fields.mask)
    if not len(fields.tokens) == len(fields.logprobs) == 4 * length:
        raise _refusal_of_lengths(fields)
    _check_starts("versions", fields.versions, length)
    _check_starts("fences", fields.fences, length)
    if len(fields.fences) > 1:
        check_fences([fence for fence, _, _ in fields.fences])
    for _, incarnation, _ in fields.fences:
        if not incarnation.isprintable():
            raise refusal(fields, CompletionFields, "its incarnations must be printable")
    if fields.branches:
        _check_branches(fields.branches, fields.mask)
    if fields.extras is not None:
        _check_values(fields.extras, length)


def _check_extras(fields: EpisodeExtras, num_prompt: int, length: int) -> None:
    """Refuse optional fields of an episode that lie beyond its tokens; raises as above."""
    _check_experts("prompt_experts", fields.prompt_experts, num_prompt)
    if fields.prompt_attachments:
        _check_places("prompt_attachments", fields.prompt_attachments, num_prompt)
    for start, end, reward in fields.turn_rewards:
        if not start < end <= length or not math.isfinite(reward):
            raise RecordError(
                f"turn_rewards must be finite, of tokens up to {length}, got {reward} of {start} "
                f"to {end}; the record is refused"
            )
    starts = [message.start for message in fields.messages]
    if starts != sorted(starts) or max(starts, default=0) > length:
        raise RecordError(
            f"messages.start must not descend and be at most {length}, got {starts[:8]}; "
            "the record is refused"
        )


def _check_values(fields: CompletionExtras, length: int) -> None:
    """Refuse optional fields of a completion that do not agree with its tokens; raises as above."""
    _check_experts("experts", fields.experts, length)
    values = {"support_sizes": fields.support_sizes, "teacher_logprobs": fields.teacher_logprobs}
    for name, array in values.items():
        if array is not None and (len(array) != 4 * length or not length):
            raise RecordError(
                f"{name} must have 4 bytes for each of {length} tokens, got {len(array)} bytes; "
                "leave it out where there are none"
            )
    if (fields.support_sizes is None) != (fields.support_ids is None):
        raise RecordError(
            "support_ids must come with support_sizes, got one of them; the record is refused"
        )
    if fields.support_ids is not None and len(fields.support_ids) % 4:
        raise _refusal_of_bytes("support_ids", fields.support_ids)
    if fields.attachments:
        _check_places("attachments", fields.attachments, length)


def _check_branches(branches: Sequence[Branch], mask: memoryview) -> None:
    starts = [branch.start for branch in branches]
    if starts[-1] >= len(mask) or any(after <= before for before, after in pairwise(starts)):
        raise RecordError(
            f"branches.start must ascend and stay below {len(mask)}, got {starts[:8]}; "
            "the record is refused"
        )
    for start, parent in branches:
        if parent is not None and parent >= start:
            raise RecordError(
                f"branches.parent must be below its start {start}, got {parent}; "
                "a branch leaves the log before it begins"
            )
        if parent is None and mask[start]:
            raise RecordError(
                f"loss_mask must be 0 on the first token of a root, got {mask[start]} at {start}; "
                "no token predicts it"
            )


def _check_experts(name: str, experts: memoryview | None, length: int) -> None:
    if experts is None:
        return
    width, rest = divmod(len(experts), length or 1)
    if rest or not length or not 0 < width <= MAX_EXPERT_BYTES:
        raise RecordError(
            f"{name} must have 1 to {MAX_EXPERT_BYTES} bytes for each of {length} tokens, got "
            f"{len(experts)} bytes; leave it out where there are none"
        )


def _check_places(name: str, attachments: Sequence[Attachment], length: int) -> None:
    starts = [attachment.start for attachment in attachments]
    if starts != sorted(starts) or starts[-1] >= length:
        raise RecordError(
            f"{name}.start must not descend and stay below {length}, got {starts[:8]}; "
            "the record is refused"
        )


def check_log(branches: Sequence[Branch]) -> None:
    """Refuse branches that leave the log of a whole completion; raises as above."""
    if branches and (branches[0].start == 0 or any((b.parent or 0) < 0 for b in branches)):
        raise RecordError(
            f"branches of a whole completion must start above 0 and have parents >= 0, got "
            f"{[tuple(branch) for branch in branches[:4]]}; its first tokens follow the prompt"
        )


def _check_keys(fields: EpisodeFields) -> None:
    """Refuse an episode whose branches would repeat many more keys than it has tokens."""
    num_prompt, length = len(fields.prompt) // 4, len(fields.completion.mask)
    keys = attended_keys(fields.completion.branches, length, num_prompt)
    most = KEYS_PER_TOKEN * (num_prompt + length)
    if keys > most:
        raise RecordError(
            f"branches must attend to at most {KEYS_PER_TOKEN} keys for each of "
            f"{num_prompt + length} tokens = {most}, got {keys}; let the agent rewrite its history "
            "less often"
        )


def check_chunks(chunks: Sequence[CompletionFields]) -> None:
    """Refuse chunks of one completion that cannot be joined; raises as above."""
    check_fences([fence for fields in chunks for fence, _, _ in fields.fences])
    full = [fields for fields in chunks if fields.mask]
    for name in ("experts", "support_sizes", "teacher_logprobs"):
        arrays = [(getattr(fields.extras, name, None), len(fields.mask)) for fields in full]
        check_widths(name, [None if a is None else len(a) // tokens for a, tokens in arrays])


def check_widths(name: str, widths: Sequence[int | None]) -> None:
    """Refuse chunks of which only some have values for each token, or longer ones; raises as above.

    Args:
        name: Name of the field.
        widths: Bytes for each token of a chunk; None where it has none.
    """
    if len(set(widths)) > 1:
        raise RecordError(
            f"{name} must be in all chunks of a completion, with as many bytes for each token, got "
            f"{widths[:8]}; their actors run with other settings"
        )


def check_fences(fences: Sequence[int]) -> None:
    """Refuse fences that decrease: a lost lease made some of the tokens; raises as above."""
    for before, after in pairwise(fences):
        if after < before:
            raise RecordError(
                f"fences must never decrease, got {before} then {after}; "
                "tokens of a lost lease are in this record"
            )


def check_numbers(
    prompts: Sequence[memoryview],
    completions: Sequence[CompletionFields],
    limits: EpisodeLimits = ANY_RUN,
) -> None:
    """Refuse token ids, log-probabilities and masks that cannot be trained on.

    Raises:
        RecordError: A number is invalid; the text does not tell which record has it.
    """
    mask = b"".join([fields.mask for fields in completions])
    if not mask:
        return
    # One array at a time: several of this size at once cost page faults.
    tokens = [fields.tokens for fields in completions]
    ids = _joined([*prompts, *tokens], "<i4")
    limits.check_token(int(_max(ids)))
    if (least := _min(ids)) < 0:
        name = "prompt_ids" if prompts and _min(_joined(prompts, "<i4")) < 0 else "token_ids"
        raise RecordError(f"{name} must be >= 0, got {least}; no vocabulary has such a token")
    logprobs = _joined([fields.logprobs for fields in completions], "<f4")
    # The maximum of values with a NaN is NaN, and comparisons with NaN are false: two checks are
    # enough.
    low, high = float(_min(logprobs)), float(_max(logprobs))
    if not (low > -math.inf and high <= MAX_LOGPROB):
        raise RecordError(
            f"behaviour_logprobs must be finite and <= 0, got {low} to {high}; "
            "an importance ratio cannot be computed from them"
        )
    if mask != b"\1" * len(mask):  # faster than by numpy
        _check_mixed(np.frombuffer(mask, np.uint8), logprobs)
    for completion in completions:
        if completion.extras is not None:
            _check_extra_numbers(completion.extras, completion.mask, limits)


def _check_extra_numbers(
    fields: CompletionExtras, loss_mask: memoryview, limits: EpisodeLimits
) -> None:
    if fields.support_sizes is not None and fields.support_ids is not None:
        sizes, ids = (np.frombuffer(x, "<i4") for x in (fields.support_sizes, fields.support_ids))
        if _min(sizes) < 0 or int(sizes.sum(dtype=np.int64)) != len(ids):
            raise RecordError(
                f"support_sizes must be >= 0 and add up to the {len(ids)} support_ids, got "
                f"{sizes.sum(dtype=np.int64)} from {_min(sizes)} up; the record is refused"
            )
        if len(ids) and _min(ids) < 0:
            raise RecordError(f"support_ids must be >= 0, got {_min(ids)}; the record is refused")
        limits.check_token(int(ids.max(initial=0)))
    if fields.teacher_logprobs is not None:
        values, mask = np.frombuffer(fields.teacher_logprobs, "<f4"), np.asarray(loss_mask)
        low, high = float(_min(values)), float(_max(values))
        if not (low > -math.inf and high <= MAX_LOGPROB) or np.any(values[mask == 0]):
            raise RecordError(
                f"teacher_logprobs must be finite and <= 0, and 0 where loss_mask is 0, got {low} "
                f"to {high}; the record is refused"
            )


def _check_mixed(mask: np.ndarray, logprobs: np.ndarray) -> None:
    """Refuse values that tokens of the environment may not have."""
    if (largest := _max(mask)) > 1:
        raise RecordError(f"loss_mask must be 0 or 1, got {int(largest)}; the record is refused")
    if np.any(logprobs[mask == 0]):
        raise RecordError(
            "behaviour_logprobs must be 0 where loss_mask is 0, got other values; "
            "the policy did not sample these tokens"
        )


def _joined(arrays: Sequence[memoryview], dtype: str) -> np.ndarray:
    return np.frombuffer(b"".join(arrays), dtype)


def _check_starts(name: str, rows: Sequence[tuple[int, int | str, int]], length: int) -> None:
    if len(rows) == 1 and rows[0][2] == 0 and length:
        return  # nearly every record: one version, one actor
    starts = [start for _, _, start in rows]
    if bool(starts) != bool(length) or len(starts) > length:
        raise RecordError(f"{name} must cover {length} tokens, got {len(starts)} spans")
    ascending = all(a < b for a, b in pairwise(starts))
    if starts and (starts[0] != 0 or not ascending or starts[-1] >= length):
        raise RecordError(
            f"{name}.start must ascend from 0 and stay below {length}, got {starts[:8]}; "
            "the record is refused"
        )


def _refusal_of_lengths(fields: CompletionFields) -> RecordError:
    """Name the array that does not have as many values as there are tokens."""
    arrays = {"token_ids": fields.tokens, "behaviour_logprobs": fields.logprobs}
    for name, array in arrays.items():
        if len(array) % 4:
            return _refusal_of_bytes(name, array)
    length = len(fields.tokens) // 4
    values = {"behaviour_logprobs": len(fields.logprobs) // 4, "loss_mask": len(fields.mask)}
    name = next(name for name, number in values.items() if number != length)
    return RecordError(
        f"{name} must have one value per token = {length}, got {values[name]}; "
        "the record is refused"
    )


def _refusal_of_bytes(name: str, array: memoryview) -> RecordError:
    return RecordError(f"{name} must be bytes in multiples of 4, got {len(array)}")
