"""How long a lease may last."""

from __future__ import annotations

from broker.server.leasing import longest_lease_ms
from configs.settings import BrokerSettings


def test_each_64_tokens_have_the_progress_timeout_and_the_environment_has_one_more() -> None:
    settings = BrokerSettings(progress_timeout_s=60.0)

    assert longest_lease_ms(settings, max_completion_tokens=128) == 3 * 60_000
