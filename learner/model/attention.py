"""Attention within each of several packed sequences, which must not see one another.

transformers calls `attend_over_ranks` in every layer, with the layer's scale, window and cap, and
passes on the `sequences` and `cut` of the forward pass. Where ranks share a microbatch, each has
all its tokens here and a part of the heads (`sequence_parallel.py`). Where sequences continue
others, keys and values are repeated for each of them, so that each attends to one stretch. One of
these computes it:

    CUDA, 16 bits, no cap     torch's kernel for sequences of different lengths, unless all of a
                              microbatch are one run that the next line takes at once
    otherwise                 SDPA for each run of neighbours of one size, its causal path where
                              they continue nothing and no window ends within them
    a cap of the logits       written out, as SDPA has none (Gemma-2)

A mask, or weights that are written out, take memory quadratic in a sequence. For a long sequence
they are made for a block of its tokens at a time, and again in the backward pass.

Shapes: T tokens of all sequences, H heads, G of them that share a head of keys and values, L tokens
of one sequence, S that are seen, R sequences of that size, K width of a head, W of anything.
"""

from __future__ import annotations

from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from configs.errors import SettingsError
from learner.algorithm.microbatch import Sequences

from .memory_rules import WEIGHTS_AT_ONCE
from .sequence_parallel import ALONE, SequenceSplit

PACKED = "packed"
"""Name under which transformers finds `attend`. It builds no mask for a name of its own."""

WIDEST_HEAD = 256  # that torch's kernel and flash attention take


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequences,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to the token itself and those before it in its sequence and the one it continues.

    Args:
        _module: The layer's attention.
        query: Shape [1, H, T, K].
        key: Shape [1, H / G, T, K].
        value: Shape [1, H / G, T, K].
        attention_mask: None: this function masks.
        sequences: The packed sequences.
        scaling: Factor of the logits; None = 1 / sqrt(K).
        sliding_window: Most tokens that one attends to, itself included; None = all before it.
        softcap: Logits become cap * tanh(logits / cap); None = they stay.
        dropout: 0: the sampler had none.

    Returns:
        Shape [1, T, H, K].
    """
    assert attention_mask is None and not dropout and len(query) == 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sequences.seen is not None:
        key, value = (_repeat(x, sequences.seen.places) for x in (key, value))
    if has_varlen_kernel(query, softcap) and not _is_one_run(sequences, sliding_window):
        out_THK = _attend_at_once(query, key, value, sequences, scale=scale, window=sliding_window)
        return out_THK[None], None
    runs = list(sequences.equal_runs())
    # `squeeze`, because the gradient of an index is a copy.
    tensors = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    split = [tensors]
    if len(runs) > 1:  # the gradient of a split is a copy
        queries, seen = [r.number * r.length for r in runs], [r.number * r.seen for r in runs]
        sizes = queries, seen, seen
        parts = (x.split(size, 1) for x, size in zip(tensors, sizes, strict=True))
        split = [*zip(*parts, strict=True)]
    pieces = []
    for run, tensors in zip(runs, split, strict=True):
        q, k, v = (x.unflatten(1, (run.number, -1)).transpose(0, 1) for x in tensors)
        out_RHLK = _attend_run(q, k, v, sliding_window, scale=scale, cap=softcap)
        pieces.append(out_RHLK.transpose(1, 2).flatten(0, 1))
    return (torch.cat(pieces) if len(pieces) > 1 else pieces[0])[None], None


def _is_one_run(sequences: Sequences, window: int | None) -> bool:
    """Whether SDPA takes all sequences at once and without a mask; on some cards by cuDNN."""
    first, *others = sequences.lengths
    is_equal = sequences.seen is None and all(length == first for length in others)
    return is_equal and (window is None or first <= window)


def _repeat(keys: Tensor, places: Tensor) -> Tensor:
    """Repeat keys or values [1, H / G, T, K] at `places` of the T."""
    repeated_SW = take(keys.squeeze(0).transpose(0, 1).flatten(1), places)
    return repeated_SW.view(len(places), keys.shape[1], -1).transpose(0, 1)[None]


def take(states_TW: Tensor, places: Tensor) -> Tensor:
    """Take rows, some of them several times.

    The gradient of an embedding adds up repeated rows in a fixed order and in float32, also on a
    GPU; the gradient of `index_select` does neither.
    """
    return functional.embedding(places, states_TW)


def has_varlen_kernel(query: Tensor, softcap: float | None) -> bool:
    """Whether torch's kernel for different lengths computes this attention."""
    is_16_bit = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_16_bit and softcap is None and query.shape[-1] <= WIDEST_HEAD


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend in one kernel. Shape [T, H, K]."""
    seen = sequences.seen or sequences
    q_THK, k_THK, v_THK = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out_THK = varlen_attn(
        q_THK,
        k_THK,
        v_THK,
        sequences.bounds,
        seen.bounds,
        max(sequences.lengths),
        max(seen.lengths),
        scale=scale,
        # Tokens before and after one's own; -1 = all. The last of a sequence sees its last key.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(out_THK, Tensor)  # nothing else was asked for
    return out_THK


def _attend_run(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, *, scale: float, cap: float | None
) -> Tensor:
    """Attend within sequences of one size, of a long one block by block. Shape [R, H, L, K]."""
    length, seen = q.shape[2], k.shape[2]
    weights = 1 if cap is None else q.shape[0] * q.shape[1]  # a mask is of all rows and heads
    rows = length
    if cap is not None or _mask_is_needed(length, seen, window):
        most = WEIGHTS_AT_ONCE // weights
        rows = max(1, most // (seen if window is None else min(seen, window + isqrt(most))))
    attend_once = partial(_attend_block, window=window, scale=scale, cap=cap)
    if rows >= length:
        return attend_once(q, k, v)
    blocks, before = [], seen - length
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        first = 0 if window is None else max(0, before + begin - window + 1)
        keys = slice(first, before + end)
        block: Tensor = checkpoint(
            attend_once,
            q[:, :, begin:end],
            k[:, :, keys],
            v[:, :, keys],
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn
        )
        blocks.append(block)
    return torch.cat(blocks, dim=2)


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, cap: float | None
) -> Tensor:
    """Attend from the last of the tokens that `k` has."""
    mask = _mask(q.shape[2], k.shape[2], window, q.device)
    if cap is None:
        return _attend_plainly(q, k, v, mask, scale=scale)
    return _attend_capped(q, k, v, mask, scale=scale, cap=cap)


def _mask_is_needed(length: int, seen: int, window: int | None) -> bool:
    """Whether a causal mask does not fit: earlier tokens are seen, or a window ends."""
    return seen != length or (window is not None and seen > window)


def _mask(length: int, seen: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where the last `length` of the tokens seen may attend; None = each to all up to itself.

    Shape [L, S].
    """
    if not _mask_is_needed(length, seen, window):
        return None
    before = seen - length
    mask_LS = torch.ones(length, seen, dtype=torch.bool, device=device).tril_(before)
    return mask_LS if window is None else mask_LS.triu_(before - window + 1)


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float
) -> Tensor:
    is_shared = k.shape[1] != q.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_shared
    )


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, cap: float
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    logits_RHLS = ((q @ k.transpose(-1, -2)) * (scale / cap)).tanh() * cap
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    logits_RHLS = logits_RHLS.masked_fill(~mask, -torch.inf)
    # bfloat16 has too few digits for a sum of weights; float64 keeps its own.
    wide = torch.promote_types(q.dtype, torch.float32)
    return logits_RHLS.softmax(-1, dtype=wide).to(q.dtype) @ v


def attend_over_ranks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cut: SequenceSplit,
    **how: Any,
) -> tuple[Tensor, None]:
    """Attend as `attend` does, where each of several ranks has a part of the tokens."""
    query, key, value = (cut.by_heads(x) for x in (query, key, value))
    out_1THK, _ = attend(module, query, key, value, attention_mask, **how)
    return cut.by_tokens(out_1THK), None


AttentionInterface.register(PACKED, attend_over_ranks)


def pack_attention(model: PreTrainedModel) -> None:
    """Make a model attend within packed sequences, in place.

    Raises:
        SettingsError: The model does not leave its attention to transformers' interface.
    """
    if model.config._attn_implementation != PACKED:
        model.set_attn_implementation(PACKED)
    if model.config._attn_implementation != PACKED:
        raise _cannot_be_packed(model, "it computes its attention in a way of its own")


def run_trunk(trunk: nn.Module, sequences: Sequences, cut: SequenceSplit) -> Tensor:
    """Run a model without its output layer over this rank's part of packed sequences.

    Returns:
        Shape [S, D], S tokens of this rank.
    """
    hidden_1SD: Tensor = trunk(
        input_ids=cut.own(sequences.token_ids_T)[None],
        position_ids=cut.own(sequences.positions_T)[None],
        use_cache=False,
        sequences=sequences,
        cut=cut,
    ).last_hidden_state
    return hidden_1SD.squeeze(0)


@torch.no_grad()
def check_packing(causal_lm: PreTrainedModel) -> None:
    """Refuse a model whose packed sequences would see one another; leave it packed.

    Models with a state that passes from token to token are of this kind.

    Args:
        causal_lm: A model with an attention of transformers.

    Raises:
        SettingsError: Sequences would see one another, or the model cannot be packed at all.
    """
    token_ids_BT = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 4, 3, 2]]) % causal_lm.config.vocab_size
    alone_BTD = causal_lm.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state

    def cut(rows: Tensor) -> list[Tensor]:
        """Return the second row; then what both begin with, once, and the end of each."""
        return [rows[1], rows[0, :2], rows[0, 2:], rows[1, 2:]]

    pieces = [piece.numpy() for piece in cut(token_ids_BT)]
    pack_attention(causal_lm)
    try:
        sequences = Sequences.from_token_ids(pieces, prefixes=[None, None, 1, 1])
        whole = SequenceSplit(ALONE, sequences, torch.arange(len(sequences.token_ids_T)))
        packed_TD = run_trunk(causal_lm.base_model, sequences, whole)
    except TypeError as error:  # `sequences` does not arrive
        raise _cannot_be_packed(causal_lm, str(error)) from error
    if not torch.allclose(packed_TD, torch.cat(cut(alone_BTD)), rtol=1e-3, atol=1e-3):
        raise _cannot_be_packed(causal_lm, "its sequences would see one another")


def _cannot_be_packed(model: PreTrainedModel, reason: str) -> SettingsError:
    return SettingsError(
        "run.model must attend within sequences that are packed behind each other "
        f"(docs/models.md), got {type(model).__name__} ({reason}); choose another model"
    )
