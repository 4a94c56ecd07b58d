"""An environment of several turns: guess a number from 1 to 9 in four turns.

Two small classes: one makes items, the other is one episode. The same (index, seed) and the same
texts must give the same observations, since an episode may go on at another actor.
"""

from __future__ import annotations

import random

from actors.environments.base import Score, Segment, Step

NUMBERS = range(1, 10)
MOST_TURNS = 4
HELD_OUT = 10**9  # far from the indices of training


class GuessingEpisode:
    """One episode of the game."""

    def __init__(self, secret: int) -> None:
        self._secret = secret
        self._turns = 0
        self._is_found = False

    @property
    def prompt(self) -> str:
        """The text that the policy sees first."""
        return "1-9? "

    @property
    def answer(self) -> str:
        """A reference for rewards; may be None."""
        return str(self._secret)

    @property
    def demonstration(self) -> tuple[Segment, ...]:
        """A right way to play, for the supervised start of `model: init`; may be empty."""
        low, high, turns = 1, 9, []
        while (guess := (low + high) // 2) != self._secret:
            turns += [Segment(str(guess), trained=True), Segment(self._hint(guess), trained=False)]
            low, high = (guess + 1, high) if guess < self._secret else (low, guess - 1)
        return (*turns, Segment(str(guess), trained=True))

    def step(self, text: str) -> Step:
        """Take a turn of the policy and answer it."""
        self._turns += 1
        guess = int(text) if text.isdecimal() and len(text) == 1 else 0
        self._is_found = guess == self._secret
        if self._is_found or self._turns == MOST_TURNS:
            return Step()
        return Step(self._hint(guess), done=False)

    def score(self) -> Score:
        """Judge the episode; `exact` is what evaluations report as accuracy."""
        return Score(float(self._is_found), {"exact": float(self._is_found)})

    def _hint(self, guess: int) -> str:
        return " more? " if guess < self._secret else " less? "


class GuessingGame:
    """Items by their number."""

    is_thread_safe = True

    def begin(self, index: int, seed: int, *, held_out: bool) -> GuessingEpisode:  # noqa: ARG002 - an item is its index
        """Make the game of an item; all members of a group play the same one."""
        return GuessingEpisode(random.Random(index + HELD_OUT * held_out).choice(NUMBERS))

    def describe(self) -> str:
        """Name and settings; every actor of a run must have the same."""
        return "guess 1"
