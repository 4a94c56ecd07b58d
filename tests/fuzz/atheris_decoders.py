"""Coverage-guided fuzzing of all decoders, by hand and for minutes:

    pip install atheris
    python -m tests.fuzz.atheris_decoders -max_total_time=300 /tmp/corpus

The first byte chooses the decoder. An exception that is not the decoder's refusal stops the run and
leaves the bytes in a file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["broker", "buffer", "configs", "learner", "console"]):
    from tests.fuzz.support.decoders import DECODERS

CHOICES = tuple(DECODERS.values())


def try_one(data: bytes) -> None:
    """Give the rest of the bytes to the decoder that the first names."""
    if data:
        CHOICES[data[0] % len(CHOICES)].try_on(data[1:])


def seed_corpus(folder: Path) -> None:
    """Write the valid examples, for mutations to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, decoder in enumerate(CHOICES):
        for index, example in enumerate(decoder.examples):
            (folder / f"{number}-{index}").write_bytes(bytes([number]) + example)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if not argument.startswith("-"):
            seed_corpus(Path(argument))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()
