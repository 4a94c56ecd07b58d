"""Rice codes: any numbers come back, and take hardly more bits than they must."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.weights.rice_coding import decode_numbers, encode_numbers
from configs.errors import WeightsError


@given(numbers=st.lists(st.integers(0, 40) | st.integers(0, 2**32 - 1), max_size=300))
def test_any_numbers_come_back_and_what_follows_is_left(numbers):
    code = encode_numbers(np.array(numbers, np.uint32))

    found, left = decode_numbers(memoryview(code + b"more"), len(numbers))

    assert found.tolist() == numbers
    assert bytes(left) == b"more"


@pytest.mark.parametrize("density", [0.2, 0.01, 0.0003])
def test_gaps_between_independent_events_take_hardly_more_than_their_entropy(density):
    rng = np.random.default_rng(0)
    gaps = (rng.geometric(density, 20_000) - 1).astype(np.uint32)
    entropy = -np.log2(density) - (1 - density) / density * np.log2(1 - density)

    bits = 8 * len(encode_numbers(gaps)) / len(gaps)

    assert bits < 1.05 * entropy + 0.1


def test_a_code_that_was_cut_off_is_refused():
    code = encode_numbers(np.arange(200, dtype=np.uint32))

    for length in range(0, len(code) - 1, 7):
        with pytest.raises(WeightsError, match="must have"):
            decode_numbers(memoryview(code[:length]), 200)


def test_an_impossible_split_is_refused():
    code = bytearray(encode_numbers(np.arange(5, dtype=np.uint32)))
    code[0] = 32

    with pytest.raises(WeightsError, match=r"must have 5 numbers, .* split at 32"):
        decode_numbers(memoryview(bytes(code)), 5)
