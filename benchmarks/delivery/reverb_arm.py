"""The Reverb arm: its trajectory writer, and its sampler, with the same records.

Runs in an interpreter of its own that has `dm-reverb`, which Nyala itself does not need, and prints
one JSON object last. Server, writer and sampler share the process and talk over loopback.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import reverb  # type: ignore[import-not-found]

FLUSH_EVERY = 32  # items under way; Reverb itself warns at about fifty
TABLE_SIZE = 1024
SAMPLES = 10**9  # one sampler for the whole window: a new one for each batch costs far more
WARM_UP_S = 1.5


def main() -> None:
    """Measure the writer alone, then writer and sampler together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, required=True, help="records one after another")
    parser.add_argument("--record-bytes", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    records = np.fromfile(args.records, np.uint8).reshape(-1, args.record_bytes)
    figures = {
        "reverb_writer": measure(records, args.seconds, is_read=False),
        "reverb_write_and_sample": measure(records, args.seconds, is_read=True),
    }
    print(json.dumps(figures))


def measure(records: np.ndarray, seconds: float, *, is_read: bool) -> dict[str, float]:
    """Write for a while; with a reader, each item is sampled once and a full table holds us up."""
    limiter = reverb.rate_limiters.Queue(TABLE_SIZE)
    table = reverb.Table(
        "records",
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=TABLE_SIZE,
        max_times_sampled=1 if is_read else 0,
        rate_limiter=limiter if is_read else reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table], port=None)
    client = reverb.Client(f"localhost:{server.port}")
    stop = threading.Event()
    reader = threading.Thread(target=_read, args=(client, stop), daemon=True)
    if is_read:
        reader.start()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        source = cycle(records)
        _write(writer, source, WARM_UP_S)
        cpu_s, began = _cpu_s(), time.monotonic()
        episodes = _write(writer, source, seconds)
        cpu_s, wall_s = _cpu_s() - cpu_s, time.monotonic() - began
    stop.set()
    server.stop()
    return {
        "episodes_per_cpu_s": round(episodes / cpu_s, 1),
        "episodes_per_s": round(episodes / wall_s, 1),
        "episodes": episodes,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
    }


def _write(writer: reverb.TrajectoryWriter, source: Iterator[np.ndarray], seconds: float) -> int:
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(FLUSH_EVERY):
            writer.append({"record": next(source)})
            writer.create_item("records", 1.0, {"record": writer.history["record"][-1]})
        writer.flush()  # returns once the server has them
        count += FLUSH_EVERY
    return count


def _read(client: reverb.Client, stop: threading.Event) -> None:
    for sample in client.sample("records", num_samples=SAMPLES, emit_timesteps=False):
        assert sample.data[0].size
        if stop.is_set():
            return


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
