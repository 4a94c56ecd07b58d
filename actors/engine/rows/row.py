"""A request of the torch engine while it is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.engine.engine import Request, Sampled

from .draws import TokenPlace


@dataclass(slots=True)
class Row:
    """A request in the cache."""

    key: int
    request: Request
    tokens_left: int
    made: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def place(self) -> TokenPlace:
        """That of its next token."""
        position = len(self.request.token_ids) + len(self.made)
        return TokenPlace(self.request.stream, position)

    def take(self, token: int, logprob: float) -> Sampled:
        """Append a token, and see whether it is the last."""
        self.made.append(token)
        self.tokens_left -= 1
        finish_reason = None
        if token in self.request.stop_token_ids:
            finish_reason = "stop"
        elif self.tokens_left <= 0:
            finish_reason = "length"
        self.has_ended = finish_reason is not None
        return Sampled(self.key, [token], [logprob], finish_reason)
