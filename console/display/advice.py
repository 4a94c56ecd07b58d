"""The advice in a line of metrics, or in a summary."""

from __future__ import annotations

from collections.abc import Mapping


def advice_in(line: Mapping[str, object]) -> dict[str, str]:
    """Read it: name of the rule -> sentence, causes first; empty where there is none."""
    advice = line.get("advice")
    given = [each for each in advice if isinstance(each, dict)] if isinstance(advice, list) else []
    return {str(each["rule"]): str(each["text"]) for each in given if {"rule", "text"} <= {*each}}
