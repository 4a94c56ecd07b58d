"""How long a lease may last."""

from __future__ import annotations

from broker.server.leasing import longest_lease_ms, still_ms
from configs.settings import BrokerSettings, RunSettings


def test_each_64_tokens_have_the_progress_timeout_and_the_environment_has_one_more() -> None:
    settings = BrokerSettings(progress_timeout_s=60.0)

    assert longest_lease_ms(settings, max_completion_tokens=128) == 3 * 60_000


def test_a_lease_may_stand_still_while_its_longest_row_is_read() -> None:
    settings = BrokerSettings(progress_timeout_s=60.0)

    def still(prompt: int, completion: int) -> int:
        run = RunSettings(model="-", max_prompt_tokens=prompt, max_completion_tokens=completion)
        return still_ms(settings, run)

    assert still(1024, 1024) == still(256 * 59, 256) == 60_000
    assert still(256 * 60, 256) == 61_000
    assert still(1024, 131_072) == 516_000
