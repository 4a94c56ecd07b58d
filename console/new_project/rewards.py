"""Rewards of this run; `docs/rewards.md` lists the forms that a function may have."""


def in_place(completion: str, answer: str) -> float:
    """Return 1 for the right answer, and less for each character that is not in its place."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))
