"""One number for all that a batch is trained on, to compare two runs by (`docs/same-again.md`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from buffer.record.episode import Episode


def batch_digest(episodes: Sequence[Episode]) -> str:
    """Hash tasks, tokens, log-probs, masks and rewards, in the order in which they are trained."""
    digest = hashlib.blake2b(digest_size=16)
    for episode in episodes:
        completion = episode.completion
        length = len(completion.token_ids)
        digest.update(f"{episode.task_id} {length} {episode.reward.hex()}\n".encode())
        digest.update(episode.prompt_ids.tobytes())
        digest.update(completion.token_ids.tobytes())
        digest.update(completion.behaviour_logprobs.tobytes())
        digest.update(completion.loss_mask.tobytes())
    return digest.hexdigest()
