"""Rules by which the learner trades memory for time.

`nyala up --dry-run` computes with them too, so nothing here imports torch.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple


class ChunkSize(NamedTuple):
    """Bounds of a chunk of logits: as many tokens as make `logits`, and at least `tokens`."""

    logits: int
    tokens: int


# In float32, 16 MiB on a CPU and 512 MiB on a GPU. With fewer tokens, reading the weight and its
# gradient for each chunk would take longer than the products.
CHUNK_SIZES = {"cpu": ChunkSize(2**22, 64), "cuda": ChunkSize(2**27, 1024)}

WEIGHTS_AT_ONCE = 2**24
"""Elements of an attention's mask, or of its weights where these are written out, that are there at
a time: of a longer sequence they are made block by block, and again in the backward pass."""
BLOCK = 256
"""Elements with one scale, of AdamW's moments in 8 bits."""
FOUR_BIT_BLOCK = 64
"""Elements with one scale, of a frozen weight in 4 bits."""
LARGE = 1_000_000_000
"""Parameters above which activations are checkpointed on a GPU by default."""
SMALL_PART = 0.2  # activations, moments and masters need most of a card


def default_checkpointing(
    parameters: int, *, on_gpu: bool, is_offloaded: bool = False
) -> Literal["none", "full"]:
    """Choose `learner.activation_checkpointing` where it is not set.

    Args:
        parameters: Parameters of the model.
        on_gpu: Passes run on a GPU, where memory is scarce.
        is_offloaded: Activations go to host memory; only the inputs of layers are copied in time.
    """
    return "full" if is_offloaded or (on_gpu and parameters > LARGE) else "none"


def base_dtype(setting: str | None, *, is_narrow: bool) -> str:
    """Fill in the default of `learner.base_dtype`: that of forward passes, which rounds nothing.

    Args:
        setting: Value of `learner.base_dtype`.
        is_narrow: Forward and backward passes compute in bfloat16.
    """
    return setting or ("bfloat16" if is_narrow else "float32")


def reduces_once(
    parameters: int, *, trained: int, ranks: int, memory: float, is_offloaded: bool = False
) -> bool:
    """Whether gradients are reduced over the ranks once for an optimizer step.

    Until then each rank holds whole gradients and gathered parameters, of 4 bytes at most: they
    must be a small part of its memory.

    Args:
        parameters: Parameters of the models that are trained.
        trained: Parameters that have gradients.
        ranks: Number of the learner's ranks; one alone has nothing to reduce.
        memory: Bytes of the smallest card, or of a rank's share of the machine.
        is_offloaded: Gradients and parameters would pass between card and host memory each time,
            on one rank too.
    """
    return (ranks > 1 or is_offloaded) and 4 * (parameters + trained) <= SMALL_PART * memory


def host_share(ranks: int) -> int:
    """Return the bytes of this machine's memory for each of its ranks."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
