"""Settings of other projects that Nyala leaves out on purpose."""

from __future__ import annotations

LEFT_OUT = dict.fromkeys(
    ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "has no counterpart: ratios compare the policies' whole distributions, and a truncated or "
    "penalised one is that of neither; use run.temperature",
)
"""Setting -> the reason, said to whoever asks for it."""
