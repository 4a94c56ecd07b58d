"""The time that an actor works, out of the tokens that its engine makes.

    work = time without room for another episode + tokens made beside / most tokens a second

An engine that has one episode is not at rest, and may still be far from all that it could do: on a
GPU twice as many episodes make almost twice as many tokens, on a CPU hardly more. So the most is
learned from the engine itself: tokens a second at each number of episodes, and of these the
greatest. Pure.
"""

from __future__ import annotations

ENOUGH_S = 30.0
"""With a number of episodes, until its speed counts."""
HALF_LIFE_S = 600.0  # of what was seen: answers grow longer in training, and engines slower


class Work:
    """Intervals in; the seconds of work in each out."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """With so many episodes, by powers of two."""
        self._tokens: dict[int, float] = {}

    def add(self, passed_s: float, tokens: int, *, episodes: int, is_full: bool) -> float:
        """Take an interval, and return how much of it was work, seconds.

        Args:
            passed_s: Its length.
            tokens: Made in it.
            episodes: That the engine has at its end.
            is_full: There is no room for another.
        """
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        for seen in (self._seconds, self._tokens):
            for number in seen:
                seen[number] *= kept
        number = episodes.bit_length()
        self._seconds[number] = self._seconds.get(number, 0.0) + passed_s
        self._tokens[number] = self._tokens.get(number, 0.0) + tokens
        most = self._most()
        if is_full or most is None:
            return passed_s if is_full or episodes else 0.0
        return tokens / most

    def _most(self) -> float | None:
        """Tokens a second at the best number; None before enough was seen of any."""
        speeds = [
            self._tokens[number] / seconds
            for number, seconds in self._seconds.items()
            if seconds >= ENOUGH_S and self._tokens[number]
        ]
        return max(speeds, default=None)
