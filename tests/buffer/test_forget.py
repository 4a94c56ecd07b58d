"""Removal of one run's keys, by `nyala up --fresh`, from a Redis that several runs share."""

import pytest
import redis

from buffer.admin import forget_run
from configs.errors import StoreError


def test_all_keys_of_the_run_go_and_those_of_others_stay(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        for key in ("nyala:{a}:meta", "nyala:{a}:t:1", "nyala:{ab}:meta", "nyala:{b}:a:meta", "x"):
            client.set(key, "v")

        assert forget_run(redis_url, "a") == 2

        assert sorted(client.keys()) == [b"nyala:{ab}:meta", b"nyala:{b}:a:meta", b"x"]


def test_a_store_that_is_away_is_reported():
    with pytest.raises(StoreError, match=r"forget: Redis cannot be reached .*run 'a' at"):
        forget_run("redis://127.0.0.1:1/0", "a")
