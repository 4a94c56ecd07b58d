"""Files with functions of the user: copies of ours, and functions that are written out."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.settings import AlgorithmSettings

HEAD = """\
import math
from math import comb

import numpy as np
import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.advantages import STD_FLOOR, BatchRewards, Float64
from learner.algorithm.corrections import Corrected
from learner.algorithm.microbatch import Segments
from learner.algorithm.surrogates import Objective, Terms

"""
"""What a file of the user imports."""


def write_functions(path: Path, source: str) -> Path:
    """Write a file with functions of the user."""
    path.write_text(HEAD + textwrap.dedent(source))
    return path


def copy_function(function: Callable[..., Any], path: Path) -> str:
    """Copy one of our functions into a file, with those that it calls; its name in the settings."""
    needed = [function]
    module = importlib.import_module(function.__module__)
    for copied in needed:  # grows
        callees = (getattr(module, name, None) for name in copied.__code__.co_names)
        needed += [f for f in callees if inspect.isfunction(f) and f not in needed]
    write_functions(path, "\n\n".join(inspect.getsource(f) for f in needed))
    return f"{path}:{function.__name__}"


def our_names(key: str) -> set[str]:
    """Return the names of ours that a setting of `algorithm` takes."""
    schema = AlgorithmSettings.model_json_schema()["properties"][key]
    return {name for branch in schema.get("anyOf", [schema]) for name in branch.get("enum", ())}
