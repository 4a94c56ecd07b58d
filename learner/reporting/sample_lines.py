"""A kept episode as a line of `samples.jsonl`: its text, its reward, and where it comes from.

Producer: the learner. Consumer: `nyala samples`, and whoever reads JSON. Loads without torch.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from buffer.record.episode import Completion, Episode

By: TypeAlias = Literal["policy", "environment"]


class Origin(NamedTuple):
    """Where an episode is from; its record does not have it."""

    step: int
    """The batch that trained it, or the batches trained by the policy that was evaluated."""
    lineage: int
    """The learner's own."""
    environment: str
    sample: int | None = None
    """Of an evaluation: 0 = the greedy answer."""


class Turn(msgspec.Struct):
    """A stretch of the completion that one side wrote."""

    by: By
    text: str
    """Special tokens included."""
    tokens: int


class SampleLine(msgspec.Struct):
    """One episode."""

    step: int
    lineage: int
    kind: Literal["train", "eval"]
    environment: str
    sample: int | None
    group: int
    task: int
    question: str
    """Short digest of the prompt's tokens: the same question has the same one at any step."""
    prompt: str
    turns: list[Turn]
    reward: float
    """As it is trained, after weights and punishments."""
    parts: dict[str, float]
    metrics: dict[str, float]
    """Of the environment."""
    finish: str
    actor: str
    versions: list[tuple[int, int, int]]
    """(lineage, step, first token) of each policy that sampled a stretch."""
    logprobs: str
    """log mu of the completion's tokens, nats: float16, little-endian, base64."""
    trained_tokens: int
    started: float
    finished: float
    notes: dict[str, str]
    """Small texts that the actor sent along, such as the right answer."""

    @property
    def text(self) -> str:
        """The whole completion."""
        return "".join(turn.text for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Tokens of the completion."""
        return sum(turn.tokens for turn in self.turns)


def sample_line(
    origin: Origin, episode: Episode, decode: Callable[[Sequence[int]], str]
) -> SampleLine:
    """Write an episode as a line.

    Args:
        origin: Where it is from.
        episode: As it was trained, or as it answered an evaluation.
        decode: Text of tokens.
    """
    completion = episode.completion
    return SampleLine(
        step=origin.step,
        lineage=origin.lineage,
        kind="train" if episode.purpose == "train" else "eval",
        environment=origin.environment,
        sample=origin.sample,
        group=episode.group_id,
        task=episode.task_id,
        question=hashlib.blake2b(episode.prompt_ids.tobytes(), digest_size=4).hexdigest(),
        prompt=_text(episode.prompt_ids.tolist(), decode),
        turns=[
            Turn(by, _text(token_ids, decode), len(token_ids))
            for by, token_ids in _stretches(completion)
        ],
        reward=float(episode.reward),
        parts=episode.reward_parts,
        metrics=episode.environment_metrics,
        finish=episode.finish_reason,
        actor=episode.incarnation,
        versions=[
            (span.version.lineage, span.version.step, span.start) for span in completion.versions
        ],
        logprobs=_packed(completion),
        trained_tokens=completion.num_trained,
        started=episode.started_at,
        finished=episode.finished_at,
        notes=episode.metadata,
    )


def logprobs_of(line: SampleLine) -> list[float]:
    """Read the log-probs of a line.

    Raises:
        ValueError: They are damaged.
    """
    packed = base64.b64decode(line.logprobs, validate=True)
    return [round(value, 4) for value in np.frombuffer(packed, dtype="<f2").tolist()]


def _text(token_ids: list[int], decode: Callable[[Sequence[int]], str]) -> str:
    try:
        return decode(token_ids)
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        # Of an evaluation or of a unit that waits, nobody has compared them with the vocabulary.
        return f"[{len(token_ids)} tokens that the tokenizer refuses: {error}]"


def _packed(completion: Completion) -> str:
    # The least that a float16 holds: JSON readers would have to know infinities.
    bounded = np.maximum(completion.behaviour_logprobs, np.finfo(np.float16).min)
    return base64.b64encode(bounded.astype("<f2").tobytes()).decode()


def _stretches(completion: Completion) -> Iterator[tuple[By, list[int]]]:
    """Split a completion where the writer changes."""
    token_ids, mask = completion.token_ids, completion.loss_mask
    if not mask.any():  # overlong filtering has hidden who wrote which token
        mask = np.ones_like(mask)
    ends = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(token_ids)]
    start = 0
    for end in ends:
        if end > start:
            yield "policy" if mask[start] else "environment", token_ids[start:end].tolist()
        start = end
