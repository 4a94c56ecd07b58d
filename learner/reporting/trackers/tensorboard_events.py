"""TensorBoard: events in `<run>/tensorboard`, by the package `tensorboard` alone, without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from configs import markdown
from configs.markdown import literal

from .http_api import require_package
from .tracker import Parameters, SampleTable, TrackedFigures

FOLDER = "tensorboard"


class TensorboardEvents:
    """A file of events for each life of the learner; TensorBoard draws them as one run.

    Figures are scalars. Tables and settings are texts in Markdown, and the settings hyperparameters
    too.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._writer: Any = None
        self._protos: Any = None

    def check_requirements(self) -> None:
        require_package("tensorboard")

    def start_run(self, run_id: str | None, parameters: Parameters) -> str:
        """Begin a file; the settings go into the first."""
        writing = import_module("tensorboard.summary.writer.event_file_writer")
        self._protos = import_module("tensorboard.compat.proto.event_pb2")
        self._writer = writing.EventFileWriter(str(self._folder))
        if run_id is None:
            self._add(0, time.time(), self._hyperparameters(parameters))
            rows = [(name, json.dumps(value)) for name, value in parameters.items()]
            self._text(
                "settings", 0, time.time(), markdown.table(("setting", "value"), rows, cell=literal)
            )
            self._writer.flush()
        return FOLDER

    def log(self, points: Sequence[TrackedFigures]) -> None:
        for point in points:
            summary = import_module("tensorboard.compat.proto.summary_pb2").Summary()
            for name, figure in point.figures.items():
                summary.value.add(tag=name, simple_value=figure)
            self._add(point.step, point.time, summary)
        self._writer.flush()

    def table(self, table: SampleTable) -> None:
        rows = [[str(value) for value in row] for row in table.rows]
        text = markdown.table(table.columns, rows, cell=literal)
        self._text(table.name, table.step, table.time, text)
        self._writer.flush()

    def take_model(self, folder: Path, on_progress: Callable[[], None]) -> None:
        """Do nothing: TensorBoard keeps no models."""

    def end_run(self, *, is_finished: bool) -> None:  # noqa: ARG002 - as every tracker
        self._writer.close()

    def _text(self, name: str, step: int, at: float, text: str) -> None:
        summary = import_module("tensorboard.compat.proto.summary_pb2").Summary()
        metadata = import_module("tensorboard.plugins.text.metadata")
        value = summary.value.add(
            tag=f"{name}/text_summary",
            metadata=metadata.create_summary_metadata(display_name=name, description=""),
        )
        value.tensor.dtype = import_module("tensorboard.compat.proto.types_pb2").DT_STRING
        value.tensor.string_val.append(text.encode())
        value.tensor.tensor_shape.dim.add(size=1)
        self._add(step, at, summary)

    def _hyperparameters(self, parameters: Parameters) -> Any:
        hparams = import_module("tensorboard.plugins.hparams.summary_v2")
        as_text = {name: "null" if value is None else value for name, value in parameters.items()}
        return hparams.hparams_pb(as_text)

    def _add(self, step: int, at: float, summary: Any) -> None:
        self._writer.add_event(self._protos.Event(wall_time=at, step=step, summary=summary))
