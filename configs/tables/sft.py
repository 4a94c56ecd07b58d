"""`sft`: rows and passes of supervised training, which `nyala sft` does."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from .base import Positive, SettingsTable


class SftSettings(SettingsTable):
    """Supervised training before a run; rates, memory and ranks are those of `learner`."""

    data: str | None = None
    """Rows to imitate, with `messages`, or with `prompt` and `completion`: a file (`.jsonl`,
    `.json`, `.csv`, `.tsv`, `.parquet`), a folder that `datasets` has saved, or a name on its hub.
    null = the demonstrations of `run.environment`.

    Set it to your file of examples."""
    epochs: Annotated[float, Field(gt=0)] = 3.0
    """Times that each row is trained; a part of a pass is possible.

    Lower it when the held-out loss rises again, raise it when it still falls."""
    batch: Positive = 32
    """Rows of an optimizer step, on all ranks together.

    Raise it when the loss is noisy, lower it for more optimizer steps from few rows."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Rows that are set aside at random and never trained; their loss is measured every
    `run.eval_every` steps.

    Raise it from 0 to see when training begins to repeat rows by heart."""

    def total(self, rows: int) -> int:
        """Return the rows of all optimizer steps, each as often as it is trained."""
        return max(1, round(self.epochs * rows))

    def steps(self, rows: int) -> int:
        """Return the number of optimizer steps; the last one may have fewer rows."""
        return math.ceil(self.total(rows) / self.batch)
