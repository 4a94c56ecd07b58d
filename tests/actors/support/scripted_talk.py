"""A conversation whose observations are written beforehand."""

from __future__ import annotations

from actors.environments.base import Score, Segment, Step


class Talk:
    """A conversation that answers each turn with the next of `observations`, then is done."""

    answer = None
    demonstration: tuple[Segment, ...] = ()

    def __init__(self, prompt: str, *observations: str) -> None:
        self.prompt = prompt
        self.observations = list(observations)
        self.heard: list[str] = []

    def step(self, text: str) -> Step:
        self.heard.append(text)
        if not self.observations:
            return Step()
        return Step(self.observations.pop(0), done=False)

    def score(self) -> Score:
        return Score(float(len(self.heard)))
