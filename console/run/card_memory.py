"""Memory of the learner on one card, computed from settings and the model's `config.json`.

FSDP2 shards weights, gradients and moments over the ranks of `parallel.shard`; activations are of a
rank's own tokens, its part of a microbatch under `parallel.sequence`:

    all the time             float32 weights, gradients and the optimizer's moments, a rank's share
    the backward pass begins the activations of all layers, those of one layer once more where they
                             are computed again, a chunk of logits, gathered weights
    the backward pass ends   the embeddings' gradient, whole, and its float32 copy to be reduced
    a publication            the largest tensor, whole

Whole weights and gradients stay on a card until the end of an optimizer step where they are a small
part of it (`learner/model/memory_rules.py`). The largest of the last three counts. Allocator and
libraries take some more. What is there all the time may lie in host memory (`learner.offload`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from configs.errors import SettingsError
from configs.settings import Settings
from configs.validation.parallel import layout_of
from learner.model.memory_rules import (
    BLOCK,
    CHUNK_SIZES,
    default_checkpointing,
    host_share,
    reduces_once,
)

from .placement import query_gpus

GIB = 2**30
QK_NORMS = ("gemma3_text", "olmo2", "qwen3")
"""Types of models that normalise queries and keys."""
BLOCKS_ALIVE = 3 / 8
"""Blocks of an eighth of a chunk that are in float32 at a time."""
LAYERS_COPIED = 3
"""Layers whose inputs are on the card, or on their way, where these are offloaded."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    is_tied: bool
    has_qk_norm: bool
    is_eager: bool
    """Its attention keeps all its weights: a cap leaves no other way."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read them from a model's configuration."""
        heads, width = config["num_attention_heads"], config["hidden_size"]
        return cls(
            layers=config["num_hidden_layers"],
            width=width,
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or width // heads,
            vocabulary=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", True)),
            has_qk_norm=config.get("model_type") in QK_NORMS,
            is_eager=config.get("attn_logit_softcapping") is not None,
        )

    @property
    def queries_and_keys(self) -> int:
        """Elements per token."""
        return (self.heads + self.kv_heads) * self.head_width

    @property
    def attended(self) -> int:
        """Elements per token that attention gives."""
        return self.heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        projections = self.queries_and_keys + self.kv_heads * self.head_width + self.attended
        norms = 2 * self.width + (2 * self.head_width if self.has_qk_norm else 0)
        return self.width * projections + 3 * self.width * self.inner + norms

    @property
    def root_parameters(self) -> int:
        """Parameters besides the layers: embeddings, output layer, last norm."""
        matrices = 1 if self.is_tied else 2
        return matrices * self.vocabulary * self.width + self.width

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.root_parameters

    def kept(self, kind: str, itemsize: int, longest: int = 0) -> int:
        """Bytes that a layer keeps per token for its backward pass.

        Args:
            kind: `learner.activation_checkpointing`.
            itemsize: Bytes of an element in forward and backward passes.
            longest: Tokens of the longest episode, which eager attention multiplies.
        """
        values = self.kv_heads * self.head_width
        attention = itemsize * self.attended + 4 * self.heads
        if kind == "full":
            return itemsize * self.width
        if kind == "selective":
            products = self.queries_and_keys + values + 3 * self.width + 2 * self.inner
            return itemsize * products + attention
        # A norm keeps its input in float32, and its output before and after its weight.
        norms = 2 * ((4 + 2 * itemsize) * self.width + 4)
        if self.has_qk_norm:
            norms += (4 + itemsize) * self.queries_and_keys + 4 * (self.heads + self.kv_heads)
        inner = itemsize * 4 * self.inner
        attention += itemsize * (self.queries_and_keys + values)
        if self.is_eager:
            attention += (4 + 2 * itemsize) * self.heads * longest
        return norms + attention + inner


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes on each card, and the settings that they come from."""

    ranks: int
    kind: str
    """`learner.activation_checkpointing`, its default filled in."""
    tokens: int
    """Of a microbatch."""
    states: Mapping[str, int]
    """There all the time."""
    step: Mapping[str, int]
    """There when the backward pass begins."""
    reduction: int
    """There when it ends."""
    publication: int
    host: Mapping[str, int]
    """In host memory, for each card."""

    @property
    def total(self) -> int:
        """The most at a time."""
        return sum(self.states.values()) + max(
            sum(self.step.values()), self.reduction, self.publication
        )

    def lines(self) -> list[str]:
        """Write the figures, one a line."""
        rows = {
            **self.states,
            **self.step,
            "or, as the backward pass ends": self.reduction,
            "or, the largest tensor published": self.publication,
            "at most at a time": self.total,
        }
        head = (
            f"memory of the learner on each of {self.ranks} card(s), computed: microbatches of "
            f"{self.tokens} tokens, activation_checkpointing {self.kind}"
        )
        lines = [head, *(f"  {size / GIB:8.2f} GiB  {name}" for name, size in rows.items())]
        if self.host:
            lines.append("in host memory, for each card:")
            lines += [f"  {size / GIB:8.2f} GiB  {name}" for name, size in self.host.items()]
        return lines

    def check(self, card_bytes: int) -> None:
        """Refuse a card that is too small.

        Raises:
            SettingsError: It is.
        """
        if self.total <= card_bytes:
            return
        raise SettingsError(
            f"the learner must fit {card_bytes / GIB:.1f} GiB on each card, got "
            f"{self.total / GIB:.1f} GiB (computed, of which {sum(self.states.values()) / GIB:.1f} "
            f"GiB weights, gradients and moments); {self._way_out()}"
        )

    def _way_out(self) -> str:
        largest_state = sum(self.states.values()) > sum(self.step.values())
        if self.kind != "full" and not largest_state:
            return "set learner.activation_checkpointing: full"
        if largest_state:
            return (
                f"set learner.ranks above {self.ranks}, or learner.offload: [parameters], or "
                "choose a smaller model"
            )
        return f"set learner.microbatch_tokens below {self.tokens}"


def card_memory(
    settings: Settings, config: Mapping[str, Any], *, on_gpu: bool, card_bytes: int | None = None
) -> CardMemory:
    """Compute what the learner takes.

    Args:
        settings: Of the run.
        config: Of its model.
        on_gpu: In bfloat16 where `run.dtype` is, and with the defaults of a GPU.
        card_bytes: Of the GPU, where it is known: some steps keep more where there is room.
    """
    run, learner = settings.run, settings.learner
    shape = ModelShape.of(config)
    itemsize = 2 if on_gpu and run.dtype == "bfloat16" else 4
    kind = learner.activation_checkpointing
    if kind is None:
        offloads = "activations" in learner.offload
        kind = default_checkpointing(shape.parameters, on_gpu=on_gpu, is_offloaded=offloads)
    longest = run.max_prompt_tokens + run.max_completion_tokens
    layout = layout_of(settings.parallel, learner.ranks)
    tokens = max(learner.microbatch_tokens, longest)
    own_tokens = -(-tokens // layout.sequence)
    states = _states(settings, shape, shard=layout.shard)
    step = _step(shape, kind, itemsize, own_tokens, longest, on_gpu=on_gpu)
    reduction = (2 * itemsize + 4) * shape.root_parameters
    host: dict[str, int] = {}
    if on_gpu and "activations" in learner.offload:
        host["activations"] = step["activations"]
        step["activations"] = host["activations"] * LAYERS_COPIED // shape.layers
    is_offloaded = on_gpu and "parameters" in learner.offload
    if is_offloaded:
        host, states = host | states, {}
        moved = 4 * -(-(shape.root_parameters + 2 * shape.layer_parameters) // layout.shard)
        step["float32 weights on their way from host memory"] = moved
        reduction += moved
    memory = (card_bytes or 0) if on_gpu else host_share(learner.ranks)
    trained = _trained_models(settings) * shape.parameters
    if reduces_once(trained, ranks=learner.ranks, memory=memory, is_offloaded=is_offloaded):
        gathered = shape.root_parameters + 2 * shape.layer_parameters  # counted above already
        held = (itemsize + 4) * trained - itemsize * gathered
        step["all weights and gradients, until these are reduced"] = held
        reduction += held
    return CardMemory(
        ranks=learner.ranks,
        kind=kind,
        tokens=tokens,
        states=states,
        step=step,
        reduction=reduction,
        publication=shape.vocabulary * shape.width * (2 if run.dtype == "bfloat16" else 4),
        host=host,
    )


def _step(
    shape: ModelShape, kind: str, itemsize: int, tokens: int, longest: int, *, on_gpu: bool
) -> dict[str, int]:
    """Bytes when the backward pass of a rank's own tokens begins."""
    again = shape.kept("none", itemsize, longest) if kind != "none" else 0
    logits, least = CHUNK_SIZES["cuda" if on_gpu else "cpu"]
    chunk = max(logits, least * shape.vocabulary)
    return {
        "activations": tokens * shape.layers * shape.kept(kind, itemsize, longest),
        "activations of one layer, computed again": tokens * again,
        "hidden states": tokens * shape.width * (4 + 3 * itemsize),
        "a chunk of logits": int(chunk * (itemsize + 4 * BLOCKS_ALIVE)),
        "gathered weights, and the output layer's gradient": itemsize
        * (2 * shape.root_parameters + 2 * shape.layer_parameters),
    }


def _trained_models(settings: Settings) -> int:
    return 2 if settings.critic.kind == "model" else 1


def _states(settings: Settings, shape: ModelShape, *, shard: int) -> dict[str, int]:
    """Bytes of weights, gradients and moments for each of the ranks that share them."""
    models = _trained_models(settings)
    share = 4 * -(-shape.parameters // shard)
    states = {"weights, float32": share * models}
    if settings.algorithm.kl_coefficient:
        states["weights of the reference"] = share
    states |= {"gradients": share * models, "moments": 2 * share * models}
    if settings.learner.optimizer == "muon":  # one for the matrices of layers
        in_layers = shape.parameters - shape.root_parameters
        states["moments"] -= 4 * -(-in_layers // shard) * models
    elif settings.learner.optimizer == "adamw8bit":  # codes, and a scale for each block of them
        states["moments"] = 2 * share * models // 4 * (BLOCK + 4) // BLOCK
    return states


def smallest_card() -> int | None:
    """Bytes of this machine's smallest card; None if there is none."""
    sizes = [int(text) for text in query_gpus("memory.total") if text.isdigit()]
    return min(sizes) * 2**20 if sizes else None
