"""Answers of a model to one prompt, for `nyala try`, with the run's template and stop rules."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

from actors.engine.choice import engine_device
from actors.engine.engine import Delta, Engine, GenerationRequest
from actors.engine.tokenizer import ModelTokenizer
from actors.engine.torch_engine import TorchOptions, torch_engine
from actors.engine.turns import StopStrings
from configs.errors import EngineError
from configs.settings import Settings


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """One completion of the prompt."""

    text: str
    """Without what ended it."""
    finish: str
    """`stop` or `length`."""
    tokens: int

    def as_json(self) -> dict[str, object]:
        """Return all fields, as they are printed in JSON."""
        return asdict(self)


async def answer(
    settings: Settings,
    model_path: str,
    prompt: str,
    *,
    n: int,
    temperature: float,
    max_tokens: int | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> list[PromptCompletion]:
    """Ask a model for answers to one prompt.

    Args:
        settings: Settings of the run.
        model_path: Folder of the model.
        prompt: The user's message; a chat template puts it behind `run.system_prompt`.
        n: Number of answers.
        temperature: Temperature of sampling; 0 = greedy.
        max_tokens: Longest answer; None = `run.max_completion_tokens`.
        on_tokens: Called with the number of tokens sampled so far.

    Raises:
        SettingsError: The model has no tokenizer, or its template does not take the prompt.
        EngineError: The model cannot be loaded, or cannot take a prompt of this length.
    """
    run = settings.run
    tokenizer = ModelTokenizer(
        model_path, system_prompt=run.system_prompt, template_kwargs=run.chat_template_kwargs
    )
    token_ids = tokenizer.encode_prompt(prompt)
    stops = StopStrings(run.stop, tokenizer.decode) if run.stop else None
    longest = max_tokens or run.max_completion_tokens
    device = engine_device()
    options = TorchOptions(
        model=model_path,
        max_model_len=len(token_ids) + longest,
        dtype=run.dtype if device == "cuda" else "float32",  # exact, and as fast on a CPU
        head_dtype=run.head_dtype,
        max_concurrent=n,
        threads=settings.actors.threads,
        device=device,
        seed=secrets.randbits(31),
    )
    requests = [
        GenerationRequest(str(i), token_ids, longest, temperature, tokenizer.stop_token_ids, stops)
        for i in range(n)
    ]
    engine = torch_engine(options)
    await engine.start()
    try:
        deltas = await _sample(engine, requests, on_tokens)
    finally:
        await engine.close()
    return [_completion_of(deltas[request.request_id], tokenizer, stops) for request in requests]


async def _sample(
    engine: Engine, requests: list[GenerationRequest], on_tokens: Callable[[int], None]
) -> dict[str, list[Delta]]:
    engine.submit(requests)
    deltas: dict[str, list[Delta]] = defaultdict(list)
    num_open, num_tokens = len(requests), 0
    while num_open:
        for delta in await engine.deltas():
            if delta.refusal is not None:
                raise EngineError(
                    f"the model must take the prompt, got: {delta.refusal}; shorten the prompt, or "
                    f"lower --max-tokens"
                )
            deltas[delta.request_id].append(delta)
            num_tokens += len(delta.token_ids)
            num_open -= delta.finish_reason is not None
        on_tokens(num_tokens)
    return deltas


def _completion_of(
    deltas: list[Delta], tokenizer: ModelTokenizer, stops: StopStrings | None
) -> PromptCompletion:
    token_ids = [token for delta in deltas for token in delta.token_ids]
    ended = token_ids[-1:] and token_ids[-1] in tokenizer.stop_token_ids
    text = tokenizer.decode(token_ids[:-1] if ended else token_ids)
    cut = text if stops is None else stops.cut(text)
    return PromptCompletion(cut, deltas[-1].finish_reason or "", len(token_ids))
