"""`run.environment_settings` of `environment: dataset`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class DatasetSettings(BaseModel):
    """Where the rows are, what of them is asked, and how answers are scored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str
    """`.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`; a folder that `datasets` has saved, or a
    name on its hub."""
    prompt: str = "prompt"
    """The column of the prompt, a text or a list of messages; or a text with columns in braces,
    such as `Translate: {english}`."""
    answer: str | None = None
    """The column of the reference answer, or of tests; or a text with columns in braces; null where
    a reward function needs none."""
    scorer: (
        Literal["exact", "numeric", "choice", "regex", "json_schema", "math-verify", "code"] | None
    ) = None
    """How an answer is compared with the reference; null = `exact` where there is one."""
    answer_format: str | None = None
    """Tells the model how to answer, behind the prompt; empty = nothing does, null = Nyala's own
    sentence, which `regex` and `json_schema` do without."""
    held_out: str | None = None
    """Where held-out rows are, as in `path`; null = a tenth of `path`, or its `held_out_split`."""
    split: str = "train"
    """Of a folder or a name: which part of it."""
    held_out_split: str | None = None
    """Which part of `held_out`, or of `path`, is held out; null = `split`."""
    subset: str | None = None
    """Of a name on the hub that has several."""
    seed: int = Field(default=0, ge=0)
    """Of the order of rows."""
    factory: str | None = None
    """`path/to/file.py:Class` or `module:Class`: a class of TRL's form, whose methods are tools, or
    of skyrl-gym's, that the rows are played with."""
    factory_settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords of `factory`."""
    time_limit_s: float = Field(default=5.0, gt=0)
    """Of `code`: CPU time of a program in one test."""
    memory_limit_mb: int = Field(default=512, ge=64)
    """Of `code`: memory of a program."""

    @property
    def holds_out_rows(self) -> bool:
        """Whether rows of their own are held out, and not a part of those to train on."""
        return self.held_out is not None or self.held_out_split is not None
