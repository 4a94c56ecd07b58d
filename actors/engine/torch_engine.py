"""Small engine: transformers' forward with a KV cache, for macOS and quick tests. No paging.

Requests join at any step: those of one prompt length are prefilled together into free rows of the
cache, then all rows decode together, each at its own length. Positions and mask are given for each
row, so nothing is padded. New weights are made ready in a second copy of the model's parameters.

Sampling and log-probs come from the same float32 `log_softmax(logits / temperature)`.

A deterministic engine has one row, and continues a turn token by token, as it was sampled: no bit
depends on what else was sampled where.

Shapes: R rows in use, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from buffer.record.episode import PolicyVersion
from configs.architecture import attention_of
from configs.errors import WeightsError

from .engine import INITIAL_VERSION, Request, Sampled, StagedWeights
from .rows.draws import draws_of_places, own_draws
from .rows.kv_cache import RowCache
from .rows.mask_form import MaskForm
from .rows.row import Row
from .threaded import ThreadedEngine
from .wire_tensors import named_tensors


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options of the torch engine; see `actors` in the settings."""

    model: str
    """Hugging Face model directory or hub name."""
    max_model_len: int
    dtype: str = "float32"
    head_dtype: str | None = None
    """Of the logits; None = `dtype`."""
    max_concurrent: int = 64
    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    recompute_kv: bool = False
    """Whether running requests are prefilled anew after each swap."""
    deterministic: bool = False
    """Whether a request's tokens and log-probs are the same bits on every such engine. Needs
    `max_concurrent` and `threads` of 1."""


def torch_engine(
    options: TorchOptions, *, version: PolicyVersion = INITIAL_VERSION
) -> ThreadedEngine:
    """Make a torch engine whose first weights are `version`; `start` loads it."""
    return ThreadedEngine(
        TorchStepper(options), max_model_len=options.max_model_len, version=version
    )


class TorchStepper:
    """A transformers model as a `Stepper`."""

    def __init__(self, options: TorchOptions) -> None:
        self._options = options
        self._waiting: dict[int, tuple[Request, int]] = {}
        self._probes: list[tuple[int, tuple[int, ...]]] = []
        self._rows: list[Row] = []
        """The requests in the cache, in the order of its rows."""
        self._shadow: dict[str, Tensor] = {}
        """The next weights, one tensor for each parameter; a swap exchanges the two."""

    def start(self) -> None:
        """Load the model and make its cache."""
        options = self._options
        torch.set_num_threads(options.threads)
        disable_progress_bar()  # stderr is for log lines
        attention = attention_of(AutoConfig.from_pretrained(options.model).to_dict())
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation=attention
        )
        self._mask = MaskForm(self._model.config, added=attention == "eager")
        if options.head_dtype is not None:
            layer = self._model.get_output_embeddings()
            assert isinstance(layer, nn.Linear)
            _widen(layer, getattr(torch, options.head_dtype))
        nn.Module.to(self._model, options.device)  # its own `to` has a broken signature
        self._model.eval()
        self._parameters = dict(self._model.named_parameters())  # walking the modules takes a while
        if options.deterministic:  # products by weights of another alignment may differ, too
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone()
        self._device = torch.device(options.device)
        self._generator = torch.Generator(self._device).manual_seed(options.seed)
        self._cache = RowCache(
            num_rows=options.max_concurrent, num_slots=options.max_model_len, device=self._device
        )

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        embeddings = self._model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        return embeddings.num_embeddings

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._rows or self._waiting or self._probes)

    def admit(self, key: int, request: Request, max_tokens: int) -> None:
        """Queue a request for the next free row."""
        self._waiting[key] = request, max_tokens

    @torch.inference_mode()  # the cache was made under it
    def cancel(self, keys: list[int]) -> None:
        """Free the rows of requests, and forget those that wait."""
        for key in keys:
            self._waiting.pop(key, None)
        self._free({row for row, held in enumerate(self._rows) if held.key in keys})

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        """Queue a sequence to score in the next step."""
        self._probes.append((key, token_ids))

    @torch.inference_mode()
    def step(self) -> Iterable[Sampled]:
        """Answer probes, then make one token for every row, those of new requests included."""
        probes, self._probes = self._probes, []
        sampled = [self._score(key, token_ids) for key, token_ids in probes]
        num_running = len(self._rows)
        if num_running:
            held = self._rows
            ids_R1 = torch.tensor([[row.made[-1]] for row in held], device=self._device)
            logits_RV = self._forward(ids_R1, *self._cache.begin_decode(num_running))
            sampled += self._sample(held, logits_RV)
        while self._waiting and len(self._rows) < self._options.max_concurrent:
            sampled += self._prefill()
        self._free({row for row, held in enumerate(self._rows) if held.has_ended})
        return sampled

    def pause(self) -> Iterable[Sampled]:
        """Nothing is ever on its way: a step returns all it made."""
        return ()

    def resume(self) -> None:
        """Nothing was stopped."""

    @torch.no_grad()
    def prepare(self, staged: StagedWeights) -> None:
        """Fill the shadow copy with the new weights."""
        manifest = staged.manifest
        tensors = dict(named_tensors(staged.path, manifest.tensors, manifest.num_bytes))
        parameters = self._parameters
        odd = sorted(tensors.keys() ^ parameters.keys())
        odd += sorted(
            name
            for name in tensors.keys() & parameters.keys()
            if tensors[name].shape != parameters[name].shape
        )
        if odd:
            raise WeightsError(
                f"a policy version must hold the parameters of the model, got a difference in "
                f"{odd[:3]} ({len(odd)} in all); it is of another model"
            )
        for name, parameter in parameters.items():
            if name not in self._shadow:
                self._shadow[name] = torch.empty_like(parameter)
            self._shadow[name].copy_(tensors[name])
        staged.check()

    def load(self, staged: StagedWeights) -> None:
        """Exchange weights and shadow; nothing is copied, so no size of model makes it longer."""
        assert self._shadow, staged.manifest.version
        for name, parameter in self._parameters.items():
            parameter.data, self._shadow[name] = self._shadow[name], parameter.data
        if self._options.recompute_kv:
            self._recompute()

    def read_back(self, staged: StagedWeights) -> list[str] | None:
        """Compare every parameter with the file."""
        manifest = staged.manifest
        tensors = named_tensors(staged.path, manifest.tensors, manifest.num_bytes)
        return [
            name
            for name, tensor in tensors
            if not torch.equal(self._parameters[name], tensor.to(self._device))
        ]

    def check(self) -> None:
        """Do nothing: the model lives in the thread that asks."""

    def rest(self) -> Iterable[Sampled]:
        """Every step returns all that it made."""
        return ()

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def close(self) -> None:
        """Nothing outlives the object."""

    def _prefill(self) -> list[Sampled]:
        """Take waiting requests as long as the first one, as many as there are rows."""
        first = len(self._rows)
        num_tokens = len(next(iter(self._waiting.values()))[0].token_ids)
        alike = [
            key
            for key, (request, _) in self._waiting.items()
            if len(request.token_ids) == num_tokens
        ][: self._options.max_concurrent - first]
        held = [Row(key, *self._waiting.pop(key)) for key in alike]
        self._rows += held
        if self._options.deterministic:
            return self._sample(held, self._replay(held[0].request))
        ids_RT = torch.tensor([row.request.token_ids for row in held], device=self._device)
        rows = slice(first, first + len(held))
        logits_RV = self._forward(ids_RT, *self._cache.begin_prefill(rows, num_tokens))
        return self._sample(held, logits_RV)

    def _replay(self, request: Request) -> Tensor:
        """Prefill the one row with what came before the turn, then decode what there is of it."""
        ids_1T = torch.tensor([request.token_ids], device=self._device)
        first = len(request.token_ids) - len(request.turn)
        row = self._cache.begin_prefill(slice(0, 1), first)
        logits_1V = self._forward(ids_1T[:, :first], *row)
        for place in range(first, len(request.token_ids)):
            row = self._cache.begin_decode(1)
            logits_1V = self._forward(ids_1T[:, place : place + 1], *row)
        return logits_1V

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Fill the cache of every row anew, up to the token that the next step begins with."""
        for number, row in enumerate(self._rows):
            token_ids = [*row.request.token_ids, *row.made[:-1]]
            ids_1T = torch.tensor([token_ids], device=self._device)
            place = slice(number, number + 1)
            self._forward(ids_1T, *self._cache.begin_prefill(place, len(token_ids)))

    def _forward(self, ids_RT: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Append tokens to the rows that the cache is prepared for; return last logits [R, V]."""
        output = self._model(
            input_ids=ids_RT,
            position_ids=positions,
            attention_mask=self._mask.of(mask, positions),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_RV: Tensor = output.logits[:, -1].float()
        return logits_RV

    def _free(self, rows: set[int]) -> None:
        """Close the gaps: the last row moves into each."""
        for row in sorted(rows, reverse=True):
            last = len(self._rows) - 1
            if row != last:
                self._cache.move(last, row)
                self._rows[row] = self._rows[last]
            del self._rows[last]

    def _sample(self, held: list[Row], logits_RV: Tensor) -> list[Sampled]:
        """Draw a token for each row."""
        heat_R = torch.tensor([row.request.temperature for row in held], device=self._device)
        is_greedy_R = heat_R == 0
        divisor_R1 = torch.where(is_greedy_R, 1.0, heat_R)[:, None]
        logprobs_RV = (logits_RV / divisor_R1).log_softmax(-1)
        # The largest of log p - log E, E exponential, is a draw from p; without E it is the mode.
        noise_RV = self._draws(held, logprobs_RV)
        noise_RV[is_greedy_R] = 0.0
        token_R = (logprobs_RV - noise_RV).argmax(-1)
        logprob_R = logprobs_RV.gather(-1, token_R[:, None])[:, 0]
        drawn = zip(held, token_R.tolist(), logprob_R.tolist(), strict=True)
        return [row.take(token, logprob) for row, token, logprob in drawn]

    def _draws(self, held: list[Row], like_RV: Tensor) -> Tensor:
        if not self._options.deterministic:
            return own_draws(like_RV, self._generator)
        return draws_of_places([row.place for row in held], like_RV)

    def _score(self, key: int, token_ids: tuple[int, ...]) -> Sampled:
        ids_1T = torch.tensor([token_ids], device=self._device)
        logprobs_TV = (
            self._model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)
        )
        scores_T = logprobs_TV[:-1].gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
        return Sampled(key, [], scores_T.tolist(), "stop")


def _widen(layer: nn.Linear, dtype: torch.dtype) -> None:
    """Make the output layer multiply its weights, whose dtype stays, in another dtype."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the layer's own name for it
        parameters = {name: each.to(dtype) for name, each in layer.named_parameters()}
        return functional.linear(input.to(dtype), **parameters)

    layer.forward = forward  # type: ignore[method-assign]
