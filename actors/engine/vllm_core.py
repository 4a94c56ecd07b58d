"""Requests of vLLM's core, and their tokens as it makes them.

`LLMEngine.step` makes of each step what a server wants: texts, ranks, sums and an object for every
request, which takes Python as long as an eighth of a small model's step. An actor wants token ids
and log-probs, so it takes them where the core hands them over. Nothing is held back there: a token
that was made has been returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from .engine import Sampled
from .vllm_private import (
    CoreClient,
    Sampling,
    new_request,
    next_outputs,
    prompt_logprobs,
    sampled_logprobs,
)


@dataclass(slots=True)
class _Held:
    key: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    has_begun: bool = False


class CoreRequests:
    """What one core works on."""

    def __init__(self, core: CoreClient) -> None:
        """Begin with no request."""
        self._core = core
        self._names = map(str, count(1))
        """Each is used once: a core may still have tokens of a request that was dropped."""
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: int, token_ids: tuple[int, ...], sampling: Sampling, *, salt: str) -> None:
        """Add a request.

        Args:
            key: Its tokens come out of `step` with this.
            token_ids: At least one, each below the model's vocabulary.
            sampling: May be shared by requests: the core only reads it.
            salt: Cached prefixes are shared by requests of one salt.
        """
        name = next(self._names)
        self._held[name] = _Held(key, token_ids, sampling)
        self._core.add_request(new_request(name, list(token_ids), sampling, salt))

    def drop(self, keys: Iterable[int]) -> None:
        """Drop requests; unknown keys are ignored."""
        unwanted = set(keys)
        names = [name for name, held in self._held.items() if held.key in unwanted]
        for name in names:
            del self._held[name]
        self._core.abort_requests(names)

    def begin_again(self, *, salt: str) -> None:
        """Add all requests anew that have no token yet."""
        waiting = [held for held in self._held.values() if not held.has_begun]
        self.drop(held.key for held in waiting)
        for held in waiting:
            self.add(held.key, held.token_ids, held.sampling, salt=salt)

    def step(self) -> Iterator[Sampled]:
        """Run one step of the core in this process, or wait for one of that in another."""
        requests = self._held
        for output in next_outputs(self._core):
            held = requests.get(output.request_id)
            if held is None:
                continue
            reason = output.finish_reason
            if reason is not None:
                del requests[output.request_id]
            if output.new_prompt_logprobs_tensors is not None:
                yield Sampled(held.key, [], prompt_logprobs(output), "stop")
                continue
            held.has_begun = True
            finish_reason = None if reason is None else str(reason)
            yield Sampled(held.key, output.new_token_ids, sampled_logprobs(output), finish_reason)
