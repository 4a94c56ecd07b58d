"""Sizes of a decoder by its `config.json`: parameters, bytes kept of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Self

from learner.model.memory_rules import (
    FOUR_BIT_BLOCK,
    WEIGHTS_AT_ONCE,
)

QK_NORMS = ("gemma3_text", "olmo2", "qwen3")
"""Types of models that normalise queries and keys."""
MATRICES = 7
"""Matrices of a layer."""
FUSED = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
)
"""Types of models whose norms and gates a card computes by kernels (`learner/model/fused.py`)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, as its configuration has them."""

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
    """Its attention keeps all its weights, as a cap on logits requires."""
    is_fused: bool = False
    """Its norms and gates are kernels if it is on a card."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the sizes from a model's configuration.

        Raises:
            KeyError: The configuration lacks a size.
        """
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
            is_fused=config.get("model_type") in FUSED,
        )

    def divided(self, ranks: int) -> Self:
        """Return the sizes of one rank's part of the matrices; norms stay whole."""
        return replace(
            self,
            inner=-(-self.inner // ranks),
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            vocabulary=-(-self.vocabulary // ranks),
        )

    @property
    def queries_and_keys(self) -> int:
        """Elements per token of queries and keys."""
        return (self.heads + self.kv_heads) * self.head_width

    @property
    def attended(self) -> int:
        """Elements per token of the output of attention."""
        return self.heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        norms = 2 * self.width + (2 * self.head_width if self.has_qk_norm else 0)
        return self.layer_matrices + norms

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's matrices."""
        projections = self.queries_and_keys + self.kv_heads * self.head_width + self.attended
        return self.width * projections + 3 * self.width * self.inner

    @property
    def root_parameters(self) -> int:
        """Parameters besides the layers: embeddings, output layer, last norm."""
        matrices = 1 if self.is_tied else 2
        return matrices * self.vocabulary * self.width + self.width

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + self.root_parameters

    def layer_bytes(self, base: str) -> int:
        """Bytes of a layer in the format `base`, a value of `learner.base_dtype`."""
        packed = self.layer_matrices if base == "nf4" else 0
        of_packed = packed // 2 + 2 * packed // FOUR_BIT_BLOCK
        return of_packed + itemsize_of(base) * (self.layer_parameters - packed)

    def kept_bytes(self, base: str) -> int:
        """Bytes of all parameters in the format `base`."""
        return self.layers * self.layer_bytes(base) + itemsize_of(base) * self.root_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of the adapters beside the matrices of a layer."""
        values = self.kv_heads * self.head_width
        outputs = self.queries_and_keys + values + 2 * self.inner + 2 * self.width
        return rank * (outputs + 5 * self.width + self.attended + self.inner)

    def kept(
        self,
        kind: str,
        itemsize: int,
        longest: int = 0,
        *,
        rank: int = 0,
        is_fused: bool = False,
    ) -> int:
        """Bytes that a layer keeps per token for its backward pass.

        Args:
            kind: `learner.activation_checkpointing`.
            itemsize: Bytes of an element in forward and backward passes.
            longest: Tokens of the longest episode, which eager attention multiplies up to a bound.
            rank: Rank of the adapters, each of which keeps what lies between its matrices.
            is_fused: Whether the compiler or kernels compute what lies between products and
                attention: only their inputs are kept.
        """
        low = itemsize * MATRICES * rank
        values = self.kv_heads * self.head_width
        attention = itemsize * self.attended + 4 * self.heads
        if kind == "full":
            return itemsize * self.width
        if kind == "selective":
            products = self.queries_and_keys + values + 3 * self.width + 2 * self.inner
            return itemsize * products + attention + low
        # A norm keeps its input in float32, its output, and the output before its weight if the
        # weight is trained. A fused norm keeps its input and output as they are.
        before = 0 if is_fused or rank else itemsize
        wide = itemsize if is_fused else 4
        norms = 2 * ((wide + before + itemsize) * self.width + 4)
        if self.has_qk_norm:
            norms += (wide + before) * self.queries_and_keys + 4 * (self.heads + self.kv_heads)
        inner = itemsize * (3 if is_fused else 4) * self.inner
        attention += itemsize * (self.queries_and_keys + values)
        if self.is_eager:
            kept = min(longest, isqrt(WEIGHTS_AT_ONCE // self.heads))
            attention += (4 + 2 * itemsize) * self.heads * kept
        return norms + attention + inner + low


def itemsize_of(base: str) -> int:
    """Bytes of a parameter outside the matrices of the layers."""
    return 4 if base == "float32" else 2
