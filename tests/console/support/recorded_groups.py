"""A stand-in for the process guard that records its calls."""


class Groups:
    """Records what the guard would be told."""

    def __init__(self):
        self.calls = []

    def add(self, group):
        self.calls.append(("+", group))

    def remove(self, group):
        self.calls.append(("-", group))
