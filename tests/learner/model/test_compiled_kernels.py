"""Kernels in Triton's compiler, which takes less than its interpreter; it needs no card."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.learner.support.fresh_kernels import LAYERS, LOGITS, compiled_kernels
from tests.needs import needs

pytestmark = needs("Triton")
TOKENS, VOCABULARY = 4, 151_936


@pytest.fixture(scope="module")
def logit_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Those for logits, with a cache of their own: from the user's, nothing would be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        with compiled_kernels(LOGITS) as kernels:
            yield kernels


@pytest.mark.parametrize(
    ("dtype", "has_cap", "has_entropies"),
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float32, False, True),
    ],
)
def test_kernels_for_logits_are_compiled_for_a_card(
    logit_kernels: ModuleType, dtype: torch.dtype, *, has_cap: bool, has_entropies: bool
) -> None:
    logits_CV = torch.empty(TOKENS, VOCABULARY, dtype=dtype)
    places_C, found_4C = torch.zeros(TOKENS, dtype=torch.int64), torch.empty(4, TOKENS)
    sizes = logit_kernels._sizes(VOCABULARY)
    assert sizes["BLOCK"] == logit_kernels.BLOCK
    grid = (TOKENS,)

    measured = logit_kernels._measure.warmup(
        logits_CV, places_C, found_4C, 1.25, 30.0, TOKENS, VOCABULARY, has_cap, grid=grid, **sizes
    )
    of_entropies_C = found_4C[3] if has_entropies else None
    differentiated = logit_kernels._differentiate.warmup(
        logits_CV, places_C, *found_4C[:3], of_entropies_C,
        1.25, 30.0, VOCABULARY, has_cap, has_entropies, grid=grid, **sizes,
    )  # fmt: skip

    assert measured.asm["cubin"] and differentiated.asm["cubin"]


def test_norms_of_rows_that_lie_apart_are_compiled_for_a_card() -> None:
    x = torch.empty(1, 6, 4, 128, dtype=torch.bfloat16)[:, :, :2]
    weight, roots, parts = x.new_empty(128), torch.empty(12), torch.empty(5, 128)
    with compiled_kernels(LAYERS) as kernels:
        read = kernels._rows_of(x)[1]
        assert read == (2, 512, 128)
        how = {"OFFSET": 0.0, "ROUNDS_FIRST": True, "WIDE": kernels._wide(x.dtype)}
        how |= {"ROWS": 32, "COLUMNS": 128, "num_warps": 8, "grid": (1,)}
        forward = kernels._norm_forward.warmup(
            x, x, x, weight, x, roots, 12, 128, *read, ADDS=True, EPS=1e-6, **how
        )  # fmt: skip
        backward = kernels._norm_backward.warmup(
            x, x, x, weight, roots, x, parts, 12, 128, *read, ADDS_OF_TOTAL=True, **how
        )  # fmt: skip
        added = kernels._add_up.warmup(
            parts, weight, 5, 128, WIDE=how["WIDE"], PARTS=128, COLUMNS=32, grid=(4,)
        )

    assert all(each.asm["cubin"] for each in (forward, backward, added))
