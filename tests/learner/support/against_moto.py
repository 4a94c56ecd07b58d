"""Checkpoints and records in an S3 bucket, which moto serves.

    python -m tests.learner.support.against_moto

moto does not go with the locks: it is installed into a virtual environment of its own, which is
removed again. It listens on loopback, and knows no other machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from buffer.record.object_store import ObjectStore
from configs.errors import CheckpointError
from console.run.redis_server import free_port
from lab.faults.proxy import Proxy
from learner.checkpointing.bucket_copies import COMMITTED, BucketCopies
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.manifest import KEY
from learner.reporting.metrics import Totals
from tests.learner.support.stored_bytes import WEIGHTS, StoredBytes
from tests.system.support.bucket_faults import check_run
from tests.waiting import wait_until

PATIENCE_S = 60.0
URL = "s3://checkpoints/folder"
LARGE = 24 * 2**20
"""Bytes: more than one part of an upload."""


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """Install and run the server; gives its address."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-qq", "moto[s3,server]"], check=True)
    port = free_port()
    command = [str(folder / "venv" / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: _is_up(port), "moto did not start", timeout_s=PATIENCE_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def _is_up(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def check_checkpoints(folder: Path) -> None:
    """Save, go on on an empty machine, and refuse what was changed."""
    state = LearnerState("r", "h", 1, lineage=1, cursor=0, trained=(), totals=Totals())
    saved = StoredBytes(folder / "run", keep=2, copies=BucketCopies(URL, "tiny"))
    contents = {step: os.urandom(LARGE) for step in (1, 2, 3)}
    for step, content in contents.items():
        saved.save_bytes(replace(state, step=step), content)
    copies = BucketCopies(URL, "tiny")
    assert copies._list_copies() == {"step-000002": True, "step-000003": True}

    for harm, expected in (("none", 3), ("committed", 2), ("bit", None)):
        if harm == "committed":
            copies._files.rm(copies._marker_path("step-000003"))
        if harm == "bit":
            path = f"{copies._copy_path('step-000002')}/{WEIGHTS}"
            changed = bytearray(contents[2])
            changed[LARGE // 2] ^= 1
            copies._files.pipe_file(path, bytes(changed))
        place = folder / harm
        place.mkdir()
        shutil.copy(folder / "run" / KEY, place / KEY)
        try:
            newest = StoredBytes(place, keep=2, copies=BucketCopies(URL, "tiny")).newest()
        except CheckpointError:
            assert expected is None
        else:
            assert newest is not None and newest[1].step == expected
            assert (newest[0] / WEIGHTS).read_bytes() == contents[newest[1].step]
        print(f"checkpoints, harm: {harm}: as it should")
    assert not copies._files.exists(f"{copies._copy_path('step-000001')}/{COMMITTED}")


def check_records() -> None:
    """Put a record, get it, sweep it."""
    store = ObjectStore("s3://checkpoints/records", "tiny")
    reference = store.put_record(7, b"a record")
    assert store.get(7, reference) == b"a record"
    assert store.sweep(lambda ids: [b"" for _ in ids], older_than_s=0.0) == 1
    print("records: as they should")


def main() -> None:
    """Run all checks."""
    with tempfile.TemporaryDirectory() as place, moto(Path(place)) as address:
        os.environ |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
        request = urllib.request.Request(f"{address}/checkpoints", method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
        check_checkpoints(Path(place))
        check_records()
        port = int(address.rpartition(":")[2])
        with Proxy("127.0.0.1", port) as bucket:
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{bucket.port}"
            (Path(place) / "faults").mkdir()
            check_run(Path(place) / "faults", bucket, port)


if __name__ == "__main__":
    main()
