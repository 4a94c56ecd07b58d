"""Real trackers in Pythons of their own: packages, servers, and what they have of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
found.Reload()
tags = found.Tags()
texts = {tag: [found.Tensors(tag)[0].tensor_proto.string_val[0].decode()]
         for tag in tags["tensors"] if tag.endswith("text_summary")}
print(json.dumps({
    "scalars": {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags["scalars"]},
    "texts": texts,
    "others": [tag for tag in tags["tensors"] if tag not in texts],
}))
"""
"""Read a folder of events as TensorBoard does."""

WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEAD = 32768, 7

def records(text):
    at, whole = HEAD, b""
    while at + HEAD <= len(text):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", text[at : at + HEAD])
        whole += text[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""

runs, history = [], []
for path in sorted(Path(sys.argv[1]).glob("offline-run-*/*.wandb")):
    for record in records(path.read_bytes()):
        if record.WhichOneof("record_type") == "run":
            config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            runs.append({"id": record.run.run_id, "project": record.run.project, "config": config})
        if record.WhichOneof("record_type") == "history":
            items = [(i.key or "/".join(i.nested_key), i.value_json) for i in record.history.item]
            history.append({name: json.loads(value) for name, value in items})
print(json.dumps({"runs": runs, "history": history}))
"""
"""Read W&B's offline files: records of protobuf in LevelDB's log format."""


def make_venv(folder: Path, *packages: str, with_ours: bool = False) -> Path:
    """Make a Python with packages; on top of ours where it is to run Nyala."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    if with_ours:
        (site,) = folder.glob("lib/python*/site-packages")
        ours = sysconfig.get_path("purelib")
        (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return python


def read_by(python: Path, script: str, folder: Path) -> dict[str, Any]:
    """Run a script of this module on a folder; returns the object that it prints."""
    command = [str(python), "-c", script, str(folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@contextmanager
def server(
    command: Sequence[str], url: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Run a server until the body ends, which begins once it answers."""
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=log
        )
    try:
        log_file = folder / "server.log"
        wait_until(
            lambda: _answers(url) or process.poll() is not None,
            f"{url} does not answer",
            timeout_s=120,
            every_s=0.2,
        )
        assert process.poll() is None, log_file.read_text()[-3000:]
        yield
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Get, or post, an object."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
