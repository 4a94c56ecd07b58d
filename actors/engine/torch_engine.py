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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from configs.architecture import attention_of
from configs.errors import WeightsError

from .engine import GenerationRequest, Sampled, StagedWeights
from .threaded import ThreadedEngine
from .wire_tensors import named_tensors

# --------------------------------------------------------------------------------------------------
# Random numbers of sampling: an engine's own, or those that belong to a token's place.
#
# Numbers that belong to a place are the same in every process, whatever was drawn before: an
# episode that another actor continues goes on as it would have.
#
# Shapes: R rows in use, V vocabulary.


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A token to be sampled."""

    stream: tuple[int, int]
    """Seed and task."""
    position: int
    """Tokens before it, those of the prompt included."""


def own_draws(like_RV: Tensor, generator: torch.Generator) -> Tensor:
    """Draw log E, E exponential, from an engine's own generator. Shape and dtype of `like_RV`."""
    return torch.empty_like(like_RV).exponential_(generator=generator).log_()


def draws_of_places(places: Sequence[TokenPlace], like_RV: Tensor) -> Tensor:
    """Make the log E that belong to these places, one row each. Shape and dtype of `like_RV`.

    Philox is a function of key and counter (Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3"): the key is the stream, and each position has 2^64 counts of its own.
    """
    rows = [_exponentials(place, like_RV.shape[1]) for place in places]
    return torch.from_numpy(np.log(np.stack(rows))).to(like_RV)


def _exponentials(place: TokenPlace, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    # In float64: among as many float32 as a vocabulary has, one in fifty tokens would meet a zero.
    bits = np.random.Philox(key=list(place.stream), counter=[0, place.position, 0, 0])
    return np.random.Generator(bits).standard_exponential(count)


# --------------------------------------------------------------------------------------------------
# KV cache of the torch engine: rows of one static tensor per layer, the first ones in use.
#
# A row that ends is overwritten by the last one, so that decoding reads a plain slice and copies
# nothing. transformers' layers call `update`; prefill or decode is chosen before each forward pass.
#
# Shapes: R rows in use, N rows in all, H key-value heads, S slots of a row, T new tokens, K head
# width.


class RowCache:
    """Keys and values [N, H, S, K] of every layer, and the count of filled slots of each row.

    N rows in all, H key-value heads, S slots of a row, K head width. Each forward pass is preceded
    by `begin_prefill` or `begin_decode`, after which each layer calls `update` once.
    """

    def __init__(self, *, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = slice(0, 0)
        self._prefill: slice | None = None
        """Slots that the next pass fills; None = one of each row."""
        self._longest = 0

    def begin_prefill(self, rows: slice, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Prepare rows that have `first` tokens for their next ones, up to `stop`.

        Returns:
            Positions [1, T] and mask [1, 1, T, S'] of T = stop - first tokens and S' = stop slots,
            the same for all rows; the mask is True where a token may look.
        """
        self._rows, self._prefill = rows, slice(first, stop)
        self._lengths_N[rows] = stop
        slots_1S = torch.arange(stop, device=self._lengths_N.device)[None]
        positions_1T = slots_1S[:, first:]
        return positions_1T, (positions_1T.mT >= slots_1S)[None, None]

    def begin_decode(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Prepare the first rows for a token each; return positions [R, 1], mask [R, 1, 1, S'].

        S' is the number of slots of the longest row, the new token's included.
        """
        self._rows, self._prefill = slice(0, num_rows), None
        positions_R1 = self._lengths_N[:num_rows, None].clone()
        self._lengths_N[:num_rows] += 1
        self._longest = int(positions_R1.max()) + 1
        slots = torch.arange(self._longest, device=positions_R1.device)
        return positions_R1, (slots <= positions_R1)[:, None, None]

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` by row `source`."""
        length = int(self._lengths_N[source])
        self._lengths_N[target] = length
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def update(
        self, new_keys: Tensor, new_values: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer computed [R, H, T, K]; return all that its queries may look at."""
        keys, values = self._layer(layer_idx, new_keys)
        rows = self._rows
        if (slots := self._prefill) is not None:
            keys[rows, :, slots] = new_keys
            values[rows, :, slots] = new_values
            return keys[rows, :, : slots.stop], values[rows, :, : slots.stop]
        row_R = torch.arange(rows.stop, device=keys.device)
        slot_R = self._lengths_N[rows] - 1
        keys[row_R, :, slot_R] = new_keys[:, :, 0]
        values[row_R, :, slot_R] = new_values[:, :, 0]
        return keys[rows, :, : self._longest], values[rows, :, : self._longest]

    def _layer(self, layer_idx: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._layers:
            shape = (self._num_rows, like.shape[1], self._num_slots, like.shape[3])
            # Zeros: a masked slot still takes part in a product, and memory as found may hold NaN.
            self._layers[layer_idx] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._layers[layer_idx]


# --------------------------------------------------------------------------------------------------
# Attention masks in the form that a model takes: per type of layer, and added or boolean.
#
# Shapes: R rows in use, T new tokens, S' slots that may be looked at.

LOWEST = torch.finfo(torch.bfloat16).min
"""Logit of a slot that is masked; finite in every data type of a model."""


class MaskForm:
    """The form in which the attention of a model takes its mask."""

    def __init__(self, config: PreTrainedConfig, *, added: bool) -> None:
        """Prepare.

        Args:
            config: Configuration of the model.
            added: The model's attention adds the mask to its logits, as the eager one does.
        """
        self._added = added
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())

    def convert_mask(self, mask: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask of the model, or of each type of its layers.

        Args:
            mask: True where a query may look at a slot. Shape [R, 1, T, S'], bool.
            positions: Positions of the queries. Shape [R, T].
        """
        if self._window is None:
            return self._form(mask)
        slots = torch.arange(mask.shape[-1], device=mask.device)
        near = mask & (slots > positions[:, None, :, None] - self._window)
        if not self._layer_types:
            return self._form(near)
        masks = {"full_attention": mask, "sliding_attention": near}
        return {name: self._form(masks[name]) for name in self._layer_types}

    def _form(self, mask: Tensor) -> Tensor:
        if not self._added:
            return mask
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, LOWEST)


# --------------------------------------------------------------------------------------------------
# A request of the torch engine while it is sampled.


@dataclass(slots=True)
class CachedRequest:
    """A request in the cache."""

    key: int
    request: GenerationRequest
    tokens_left: int
    sampled_ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def place(self) -> TokenPlace:
        """Place of the row's next token."""
        position = len(self.request.token_ids) + len(self.sampled_ids)
        return TokenPlace(self.request.stream, position)

    def append_token(self, token: int, logprob: float) -> Sampled:
        """Append a token; return it, with a finish reason if it is the last."""
        self.sampled_ids.append(token)
        self.tokens_left -= 1
        finish_reason = None
        if token in self.request.stop_token_ids:
            finish_reason = "stop"
        elif self.tokens_left <= 0:
            finish_reason = "length"
        self.has_ended = finish_reason is not None
        return Sampled(self.key, [token], [logprob], finish_reason)


# --------------------------------------------------------------------------------------------------
# Small engine: transformers' forward with a KV cache, for macOS and quick tests. No paging.

READ_TOKENS = 512  # of a prompt at a time: beside 128k before them, a mask of 64 MiB


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options of the torch engine; see `actors` in the settings."""

    model: str
    """Hugging Face model directory or hub name."""
    max_model_len: int
    dtype: str = "float32"
    head_dtype: str | None = None
    """Data type of the logits; None = `dtype`."""
    max_concurrent: int = 64
    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    recompute_kv: bool = False
    """Whether running requests are prefilled anew after each swap."""
    deterministic: bool = False
    """Whether a request's tokens and log-probs are the same bits on every such engine. Needs
    `max_concurrent` and `threads` of 1."""
    probe_temperature: float = 1.0
    """Temperature of the log-probs of probes."""


def torch_engine(options: TorchOptions) -> ThreadedEngine:
    """Make a torch engine of the run's first weights; `start` loads them."""
    return ThreadedEngine(TorchStepper(options), max_model_len=options.max_model_len)


class TorchStepper:
    """A transformers model as a `Stepper`."""

    def __init__(self, options: TorchOptions) -> None:
        self._options = options
        self._waiting: dict[int, tuple[GenerationRequest, int]] = {}
        self._probes: list[tuple[int, tuple[int, ...]]] = []
        self._rows: list[CachedRequest] = []
        """The requests in the cache, in the order of its rows."""
        self._shadow: dict[str, Tensor] = {}
        """The next weights, one tensor for each parameter; a swap exchanges the two."""

    def start(self) -> None:
        """Load the model and make its cache; sets the number of torch's threads in this process."""
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
            _multiply_in(layer, getattr(torch, options.head_dtype))
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

    def admit(self, key: int, request: GenerationRequest, max_tokens: int) -> None:
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
        """Answer probes, then make one token for every row, those of new requests included.

        Requests for which there is no row wait.
        """
        probes, self._probes = self._probes, []
        sampled = [self._score(key, token_ids) for key, token_ids in probes]
        num_running = len(self._rows)
        if num_running:
            held = self._rows
            ids_R1 = torch.tensor([[row.sampled_ids[-1]] for row in held], device=self._device)
            logits_RV = self._forward(ids_R1, *self._cache.begin_decode(num_running))
            sampled += self._sample(held, logits_RV)
        while self._waiting and len(self._rows) < self._options.max_concurrent:
            sampled += self._prefill()
        self._free({row for row, held in enumerate(self._rows) if held.has_ended})
        return sampled

    def pause(self) -> Iterable[Sampled]:
        """Return nothing: every step has returned all its tokens."""
        return ()

    def resume(self) -> None:
        """Do nothing: `pause` stops nothing here."""

    @torch.no_grad()
    def prepare(self, staged: StagedWeights) -> bool:
        """Fill the shadow copy with the new weights; return True.

        Raises:
            WeightsError: The file has other names or shapes than the model, cannot be read, or was
                overwritten meanwhile; the weights in use did not change.
        """
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
                "a policy version must hold the parameters of the actor's model, got a difference "
                f"in {odd[:3]} ({len(odd)} in all), so it is of another model; start the actor "
                "with the config.yaml of the run"
            )
        for name, parameter in parameters.items():
            if name not in self._shadow:
                self._shadow[name] = torch.empty_like(parameter)
            self._shadow[name].copy_(tensors[name])
        staged.check_not_overwritten()
        return True

    def is_prepared(self, staged: StagedWeights) -> bool:
        """Return True: `prepare` does everything itself."""
        del staged
        return True

    def load(self, staged: StagedWeights) -> None:
        """Exchange weights and shadow without a copy, in the same time for every size of model.

        With `recompute_kv` the cache of every running request is then computed anew.
        """
        assert self._shadow, staged.manifest.version
        for name, parameter in self._parameters.items():
            parameter.data, self._shadow[name] = self._shadow[name], parameter.data
        if self._options.recompute_kv:
            self._recompute()

    def read_back(
        self, staged: StagedWeights, moved: Callable[[], object] = lambda: None
    ) -> list[str] | None:
        """Name the parameters that differ from the file in any value; never returns None.

        Raises:
            WeightsError: The file cannot be read.
        """
        manifest, stale = staged.manifest, []
        for name, tensor in named_tensors(staged.path, manifest.tensors, manifest.num_bytes):
            if not torch.equal(self._parameters[name], tensor.to(self._device)):
                stale.append(name)
            moved()
        return stale

    def check_health(self) -> None:
        """Do nothing: the model lives in the thread that asks."""

    def rest(self) -> Iterable[Sampled]:
        """Return nothing: every step has returned all its tokens."""
        return ()

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def _prefill(self) -> list[Sampled]:
        """Take waiting requests as long as the first one, as many as there are rows."""
        first = len(self._rows)
        num_tokens = len(next(iter(self._waiting.values()))[0].token_ids)
        alike = [
            key
            for key, (request, _) in self._waiting.items()
            if len(request.token_ids) == num_tokens
        ][: self._options.max_concurrent - first]
        held = [CachedRequest(key, *self._waiting.pop(key)) for key in alike]
        self._rows += held
        if self._options.deterministic:
            return self._sample(held, self._replay(held[0].request))
        ids_RT = torch.tensor([row.request.token_ids for row in held], device=self._device)
        return self._sample(held, self._prefill_in_parts(ids_RT, slice(first, first + len(held))))

    def _prefill_in_parts(self, ids_RT: Tensor, rows: slice) -> Tensor:
        """Fill empty rows, a part at a time: a mask of all at once would be quadratic."""
        logits_RV = ids_RT
        for first in range(0, ids_RT.shape[1], READ_TOKENS):
            part_RT = ids_RT[:, first : first + READ_TOKENS]
            place = self._cache.begin_prefill(rows, first, first + part_RT.shape[1])
            logits_RV = self._forward(part_RT, *place)
        return logits_RV

    def _replay(self, request: GenerationRequest) -> Tensor:
        """Prefill the one row with the tokens before the turn, then decode the turn's own."""
        ids_1T = torch.tensor([request.token_ids], device=self._device)
        first = len(request.token_ids) - len(request.turn)
        logits_1V = self._prefill_in_parts(ids_1T[:, :first], slice(0, 1))
        for place in range(first, len(request.token_ids)):
            row = self._cache.begin_decode(1)
            logits_1V = self._forward(ids_1T[:, place : place + 1], *row)
        return logits_1V

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Fill the cache of every row anew, up to the token that the next step begins with."""
        for number, row in enumerate(self._rows):
            token_ids = [*row.request.token_ids, *row.sampled_ids[:-1]]
            ids_1T = torch.tensor([token_ids], device=self._device)
            self._prefill_in_parts(ids_1T, slice(number, number + 1))

    def _forward(self, ids_RT: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Append tokens to the rows that the cache is prepared for; return last logits [R, V]."""
        output = self._model(
            input_ids=ids_RT,
            position_ids=positions,
            attention_mask=self._mask.convert_mask(mask, positions),
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

    def _sample(self, held: list[CachedRequest], logits_RV: Tensor) -> list[Sampled]:
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
        return [row.append_token(token, logprob) for row, token, logprob in drawn]

    def _draws(self, held: list[CachedRequest], like_RV: Tensor) -> Tensor:
        if not self._options.deterministic:
            return own_draws(like_RV, self._generator)
        return draws_of_places([row.place for row in held], like_RV)

    def _score(self, key: int, token_ids: tuple[int, ...]) -> Sampled:
        ids_1T = torch.tensor([token_ids], device=self._device)
        logits_TV = self._model(input_ids=ids_1T, use_cache=False).logits[0].float()
        logprobs_TV = (logits_TV / self._options.probe_temperature).log_softmax(-1)
        scores_T = logprobs_TV[:-1].gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
        return Sampled(key, [], scores_T.tolist(), "stop")


def _multiply_in(layer: nn.Linear, dtype: torch.dtype) -> None:
    """Make the output layer multiply its weights, whose dtype stays, in another dtype."""

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the layer's own name for it
        parameters = {name: weight.to(dtype) for name, weight in layer.named_parameters()}
        return functional.linear(input.to(dtype), **parameters)

    layer.forward = forward  # type: ignore[method-assign]
