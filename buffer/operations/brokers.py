"""What brokers say of themselves, for `nyala status`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .operation import Operation, Reply, nothing, single
from .replies import parse_texts

BROKER_MEMORY_S = 3600
"""Figures are forgotten when no broker has served for this long."""


def broker_seen(endpoint: str, figures: Mapping[str, float]) -> Operation[None]:
    """Note the figures of the broker at an address; they replace those of one there before."""
    return single("broker_seen", (endpoint, json.dumps(figures), BROKER_MEMORY_S), nothing)


def brokers() -> Operation[dict[str, dict[str, float]]]:
    """Read the figures of each broker that served within the hour, by its address."""

    def parse(reply: Reply) -> dict[str, dict[str, float]]:
        return {endpoint: json.loads(text) for endpoint, text in parse_texts(reply).items()}

    return single("read", ("brokers",), parse)
