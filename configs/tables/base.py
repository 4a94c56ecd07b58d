"""Base class and field types of the tables of settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Endpoint = Annotated[str, Field(pattern=r"^tcp://.+:\d+$")]
Address = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+)(:\d{1,5})?$")]
"""A host, or a host and a port."""
HttpEndpoint = Annotated[str, Field(pattern=r"^http://[^/]+:\d+$")]


class SettingsTable(BaseModel):
    """A settings table: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
