"""Rewards of this run; `docs/rewards.md` lists the forms that a function may have."""


def near(completion: str, answer: str) -> float:
    """Return 1 for the right number, less the farther it is, and 0 for anything else."""
    try:
        distance = abs(int(completion) - int(answer))
    except ValueError:
        return 0.0
    return 1.0 / (1 + distance)
