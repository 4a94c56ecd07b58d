"""Sizes of a decoder, from its `config.json`: parameters, and what a layer keeps of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

QK_NORMS = ("gemma3_text", "olmo2", "qwen3")
"""Types of models that normalise queries and keys."""
MATRICES = 7
"""Of a layer."""


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

    def divided(self, ranks: int) -> Self:
        """Return the part of each of the ranks that divide its matrices; norms stay whole."""
        return replace(
            self,
            inner=-(-self.inner // ranks),
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            vocabulary=-(-self.vocabulary // ranks),
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

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of the adapters beside the matrices of a layer."""
        values = self.kv_heads * self.head_width
        outputs = self.queries_and_keys + values + 2 * self.inner + 2 * self.width
        return rank * (outputs + 5 * self.width + self.attended + self.inner)

    def kept(self, kind: str, itemsize: int, longest: int = 0, *, rank: int = 0) -> int:
        """Bytes that a layer keeps per token for its backward pass.

        Args:
            kind: `learner.activation_checkpointing`.
            itemsize: Bytes of an element in forward and backward passes.
            longest: Tokens of the longest episode, which eager attention multiplies.
            rank: Of adapters, each of which keeps what lies between its matrices.
        """
        low = itemsize * MATRICES * rank
        values = self.kv_heads * self.head_width
        attention = itemsize * self.attended + 4 * self.heads
        if kind == "full":
            return itemsize * self.width
        if kind == "selective":
            products = self.queries_and_keys + values + 3 * self.width + 2 * self.inner
            return itemsize * products + attention + low
        # A norm keeps its input in float32, and its output before its weight, if that is trained,
        # and after it.
        before = 0 if rank else itemsize
        norms = 2 * ((4 + before + itemsize) * self.width + 4)
        if self.has_qk_norm:
            norms += (4 + before) * self.queries_and_keys + 4 * (self.heads + self.kv_heads)
        inner = itemsize * 4 * self.inner
        attention += itemsize * (self.queries_and_keys + values)
        if self.is_eager:
            attention += (4 + 2 * itemsize) * self.heads * longest
        return norms + attention + inner + low
