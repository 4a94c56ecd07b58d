"""The processor and the releases of libraries, which decide the last bits of a sum beside the code.

Read without importing torch.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VECTORS = ("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16")
"""Beginnings of the names of instructions by which kernels are chosen."""
LIBRARIES = ("torch", "transformers", "numpy")


def arithmetic_hash() -> str:
    """Hash the processor's model, its vector instructions, and the releases of the libraries."""
    text = "\n".join([_processor(), *(f"{name} {version(name)}" for name in LIBRARIES)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor() -> str:
    if not CPUINFO.exists():
        return f"{platform.machine()} {platform.processor()}"
    found: dict[str, str] = {}
    for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    flags = (found.get("flags") or found.get("Features") or "").split()
    vectors = sorted(flag for flag in flags if flag.startswith(VECTORS))
    return f"{platform.machine()} {found.get('model name', '')} {' '.join(vectors)}"
