"""A card in one step: time by group of kernels, launches, and gaps between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.card.machine import now
from benchmarks.card.stage import Figures

GROUPS = {
    "memcpy": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "clip and AdamW": ("adam", "multi_tensor", "lpnorm"),
    "reductions and norms": (
        "reduce",
        "softmax",
        "norm",
        "cross_entropy",
        "triton_red",
        "triton_per",
        "_measure",
    ),
    "indexing": ("embedding", "index", "gather", "scatter", "sort"),
    "copies and casts": ("copy", "catarray", "chunk_cat", "fill"),
}
REST = "elementwise"
OTHERS = ("FSDP::", "nyala.", "ProfilerStep", "PyTorch Profiler", "Activity Buffer")
"""Beginnings of names that are no kernels."""


def group_of(kernel: str) -> str:
    """Name the group of a kernel, by the first word that occurs in its name."""
    name = kernel.lower()
    return next((group for group, words in GROUPS.items() if any(w in name for w in words)), REST)


def profile_of(run: Callable[[], object], device: str) -> Figures:
    """Run once more under the profiler; on a CPU its operators are counted."""
    is_card = device == "cuda"
    kind = ProfilerActivity.CUDA if is_card else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        began = now(device)
        run()
        wall_s = now(device) - began
    where = DeviceType.CUDA if is_card else DeviceType.CPU
    events = sorted(
        (event.start_ns(), event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == where and not event.name().startswith(OTHERS)
    )
    busy, end, groups = 0, 0, Counter[str]()
    for start, took, name in events:
        busy += max(0, start + took - max(start, end))
        end = max(end, start + took)
        groups[group_of(name)] += took
    return {
        "wall_s": round(wall_s, 4),
        "busy_s": round(busy / 1e9, 4),
        "gaps_s": round(wall_s - busy / 1e9, 4),
        "launches": len(events),
        "groups_s": {group: round(took / 1e9, 4) for group, took in groups.most_common()},
    }
