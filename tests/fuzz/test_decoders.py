"""Decoders on arbitrary bytes: each reads them or refuses them by its own error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import SettingsError
from tests.fuzz.support.decoders import DECODERS
from tests.fuzz.support.lies import lies


@pytest.mark.parametrize("name", DECODERS)
def test_valid_bytes_are_read(name: str) -> None:
    if name == "checkpoint's manifest":
        return  # the files that it names are not there
    for example in DECODERS[name].examples:
        DECODERS[name].read(example)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
@settings(max_examples=60)
def test_no_bytes_raise_anything_but_the_refusal(name: str, data: Any) -> None:
    decoder = DECODERS[name]
    decoder.try_on(data.draw(lies(decoder.examples)))


@pytest.mark.parametrize(
    "data",
    [
        b"run: &x {name: *x}",
        b"run: {2020-01-01: 1}",
        b"run: {name: 2020-13-45}",
        b"run: {seed: !!int x}",
        b"broker: !!bool x",
        b"- " * 340,
    ],
)
def test_yaml_that_python_cannot_hold_is_a_settings_error(data: bytes) -> None:
    with pytest.raises(SettingsError):
        DECODERS["settings"].read(data)
