"""Claims from the settings of a whole run."""

from __future__ import annotations

from configs.settings import Settings
from learner.data.claims import Claims
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore


def make_claims(
    store: RetryingStore, settings: Settings, *, ledger: Ledger, vocabulary: int = 32
) -> Claims:
    """Hand the claims the tables that they use."""
    return Claims(
        store,
        settings.run,
        buffer=settings.buffer,
        learner=settings.learner,
        algorithm=settings.algorithm,
        rewards=settings.rewards,
        replay=settings.replay,
        ledger=ledger,
        vocabulary=vocabulary,
    )
