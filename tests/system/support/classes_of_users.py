"""Sources of environments as people bring them."""

from __future__ import annotations

GUESS = """
import random

class Guess:
    def reset(self, *, seed=None):
        self.number, self.left = random.Random(seed).randint(0, 9), 3
        return "Guess a digit.", {}

    def step(self, text):
        self.left -= 1
        right = text.strip() == str(self.number)
        told = "" if right else "higher" if text < str(self.number) else "lower"
        return told, float(right), right or not self.left, False, {"is_success": right}
"""

NUMPY = "numpy==1.26.4"
OLDER = """
import os
import random
import numpy

assert numpy.__version__ == "1.26.4"
steps = 0

class Older:
    def __init__(self, died):
        self.died = died

    def reset(self, *, seed=None):
        return f"Guess {random.Random(seed).randint(0, 9**9)}.", {}

    def step(self, text):
        global steps
        steps += 1
        if steps == 20 and not os.path.exists(self.died):
            open(self.died, "w").close()
            os._exit(5)
        reward = numpy.product([0.5, 0.5])  # which numpy 2 has no more
        return "no", float(reward), False, len(text) % 2 == 0, {}
"""
"""A game that only an older numpy than ours can play."""

SHOP = '''
class Shop:
    def reset(self, budget: int, **row) -> None:
        self.left = budget

    def pay(self, n: int) -> str:
        """Pay.

        Args:
            n: How much.
        """
        self.left -= n
        return f"{self.left} left"

    def get_reward(self) -> float:
        return float(self.left == 0)
'''
