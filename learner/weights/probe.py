"""The probe: tokens that the policy itself samples, its log-probs of them, and their rounding.

A policy alone soon comes to a text of which it is certain, and then nothing that is wrong with it
moves a log-prob. So every other token is an arbitrary one, and each between them is drawn from the
policy, by a fixed number between 0 and 1: the n-th token follows from those before it. One pass
scores the tokens and draws each again; after at most as many passes as there are tokens, all that
are drawn are the policy's. That many are made for the first version; later ones are scored once,
and the tokens follow the policy while it changes.

How far right implementations are apart depends on the policy: on the size of its logits, on how its
layers pass errors on, on how many there are. The learner measures it: it scores the tokens some
times more with all that its modules return rounded at random (`docs/weights.md` has what that
foretells).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from broker.protocol.manifest import Probe

NUM_TOKENS = 32
"""Enough for a mean over tokens, short enough for any context."""

ROUNDED_EVERY = 8
"""Versions between measurements: the policy's rounding changes slowly."""

NUM_ROUNDED = 4
"""Passes over which the mean is taken: a single pass underestimates it by up to half."""

Score = Callable[[tuple[int, ...], tuple[float, ...]], tuple[Sequence[float], Sequence[int]]]
"""Maps tokens, and a number for each but the first, to their log-probs (nats) and to tokens drawn
in their place. Collective where the policy is sharded."""

Rounded = Callable[[tuple[int, ...], int], Sequence[float]]
"""Maps tokens and a seed to log-probs with all outputs of modules rounded at random."""


class PolicyProbe:
    """Makes the probe of each published version.

    Args:
        score: Returns the log-probs of the policy.
        rounded: Returns the log-probs of the policy, rounded at random.
        num_tokens: Number of tokens, at least 2.
        vocabulary: Number of token ids of the policy.
        rounded_every: Versions from one measurement of the rounding to the next.
    """

    def __init__(
        self,
        score: Score,
        rounded: Rounded,
        *,
        num_tokens: int,
        vocabulary: int,
        rounded_every: int = ROUNDED_EVERY,
    ) -> None:
        draw = random.Random(0)
        self._score = score
        self._rounded = rounded
        self._numbers = tuple(draw.random() for _ in range(num_tokens - 1))
        self._token_ids = tuple((11 + 7919 * t) % vocabulary for t in range(num_tokens))
        self._num_made = 0
        self._rounded_every = rounded_every
        self._rounding = 0.0, 0.0

    def __call__(self) -> Probe:
        """Score the tokens under the present weights. Collective where `score` is.

        The first call makes as many passes more as there are tokens to draw, and each that is due
        for the rounding makes `NUM_ROUNDED` more.
        """
        for _ in () if self._num_made else self._numbers:
            # As many on every rank: each pass gathers the parameters.
            self._token_ids, _ = self._next()
        token_ids = self._token_ids
        self._token_ids, logprobs = self._next()
        if self._num_made % self._rounded_every == 0:
            passes = (self._rounded(token_ids, seed) for seed in range(NUM_ROUNDED))
            moved = [
                abs(a - b) for rounded in passes for a, b in zip(rounded, logprobs, strict=True)
            ]
            self._rounding = sum(moved) / len(moved), max(moved)
        self._num_made += 1
        return Probe(token_ids, tuple(logprobs), *self._rounding)

    def _next(self) -> tuple[tuple[int, ...], Sequence[float]]:
        logprobs, drawn = self._score(self._token_ids, self._numbers)
        follow = list(self._token_ids)
        follow[1::2] = drawn[::2]
        return tuple(follow), logprobs
