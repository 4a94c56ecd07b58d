"""Decoders of foreign bytes: from peers, the store, or a disk after a crash.

Each decoder has valid examples, to begin mutations from, and the one kind of error by which it may
refuse. Whatever else it raises would escape a loop that lives on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from broker.protocol import weight_messages
from broker.protocol.codec import decode, decode_spec, encode, encode_spec, header_of
from broker.protocol.manifest import AdapterSpec, Probe, TensorSpec, WeightManifest
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    Bye,
    Figures,
    Hello,
    Submission,
    SubmitRequest,
    TaskSpec,
)
from broker.transport.allow_list import read_allowed
from broker.transport.keys import read_key
from buffer.record.codec import (
    decode_completion,
    decode_episode,
    encode_completion,
    encode_episode,
)
from buffer.record.episode import PolicyVersion
from buffer.record.summaries import summaries_of_chunks, summaries_of_records
from configs.errors import CheckpointError, NyalaError, RecordError, SettingsError
from configs.json_lines import read_rows
from configs.loader import load
from learner.checkpointing.folders import LINEAGES, read_lineages, write_lineages
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.manifest import MANIFEST
from learner.checkpointing.verification import verify
from learner.reporting.journal import Journal
from learner.reporting.metrics import Totals
from tests.buffer.support.episodes import example_episode

MAX_BYTES = 2**20


@dataclass(frozen=True)
class Decoder:
    """Something that makes sense of bytes, or refuses them."""

    read: Callable[[bytes], object]
    refusal: type[NyalaError] | None
    """The error that its callers expect; None = it never refuses."""
    examples: tuple[bytes, ...]

    def try_on(self, data: bytes) -> None:
        """Read bytes; any exception but the refusal escapes."""
        try:
            self.read(data)
        except NyalaError as error:
            refusal = error
        else:
            return
        if self.refusal is None or not isinstance(refusal, self.refusal):
            raise refusal
        assert len(str(refusal)) < 10_000, "a refusal quotes little of what it refuses"


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Read a file of this name, alone in its folder."""
    folder = Path(mkdtemp(prefix="nyala-fuzz-"))

    def write_and_read(data: bytes) -> object:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        return read(folder)

    return write_and_read


def _lineages() -> bytes:
    folder = Path(mkdtemp(prefix="nyala-fuzz-"))
    write_lineages(folder, {1: 0, 2: 40})
    return (folder / LINEAGES).read_bytes()


def _shortened(read: Callable[[bytes], object], most: int) -> Callable[[bytes], object]:
    return lambda data: read(data[:most])


def _read_journal(folder: Path) -> object:
    journal = Journal(folder)
    journal.lines("batches")
    journal.rewind(3)
    return journal.lines("batches")


def _messages() -> tuple[bytes, ...]:
    version = PolicyVersion(1, 2)
    tensors = (TensorSpec("a.weight", "float32", (2, 3), 0, 24),)
    adapter = AdapterSpec("b" * 64, 1, 2.0, 20, (0,))
    probe = Probe((1, 2), (-0.5,))
    manifest = WeightManifest(version, "d" * 64, "c" * 32, 24, tensors, probe, adapter)
    messages = (
        Hello("a-1", "host", 7, {"settings": "s"}, 64),
        BeatRequest((Beat(3, 2**50, 0, 2, b"chunk"),), version, Figures(tokens=1.5)),
        SubmitRequest((Submission(3, 2**50, b"record"),)),
        Bye(),
        manifest,
        weight_messages.Announce(manifest, 4),
        weight_messages.Pull(version, 0, 64),
        weight_messages.WeightChunk(version, 0, b"bytes"),
    )
    return tuple(encode(message, run="r", incarnation="a-1", seq=5) for message in messages)


_STATE = LearnerState(
    run="r", settings_hash="h", step=3, lineage=1, cursor=4, trained=((0, 4),), totals=Totals()
)
_MANIFEST = json.dumps({"blake3": {"state.json": "0" * 64, "rank-0.bin": "1" * 64}}).encode()
_LINES = b'{"step": 1, "lag": 0.5, "groups": [1, 2]}\n{"step": 2, "lag": null}\n'

DECODERS = {
    "message": Decoder(lambda data: decode(data, max_bytes=MAX_BYTES), RecordError, _messages()),
    "header of a message": Decoder(header_of, None, _messages()),
    "task spec": Decoder(decode_spec, RecordError, (encode_spec(TaskSpec(1, 2, 3, "train", 1.0)),)),
    "episode": Decoder(decode_episode, RecordError, (encode_episode(example_episode()),)),
    "completion": Decoder(
        decode_completion, RecordError, (encode_completion(example_episode().completion),)
    ),
    "episodes at a glance": Decoder(
        lambda data: summaries_of_records([data, data], max_bytes=MAX_BYTES),
        RecordError,
        (encode_episode(example_episode()),),
    ),
    "chunks at a glance": Decoder(
        lambda data: summaries_of_chunks([data, data], max_bytes=MAX_BYTES),
        RecordError,
        (encode_completion(example_episode().completion),),
    ),
    "learner's state": Decoder(
        lambda data: LearnerState.decode(data.decode(errors="replace")),
        CheckpointError,
        (_STATE.encode().encode(),),
    ),
    "checkpoint's manifest": Decoder(_file(MANIFEST, verify), CheckpointError, (_MANIFEST,)),
    "lineages": Decoder(
        _file(LINEAGES, read_lineages),
        CheckpointError,
        (_lineages(),),
    ),
    "journal": Decoder(_file("batches.jsonl", _read_journal), None, (_LINES, b'{"step": false}')),
    "log": Decoder(
        _file("log.jsonl", lambda folder: read_rows(folder / "log.jsonl")), None, (_LINES,)
    ),
    "key": Decoder(
        _file("a.pub", lambda folder: read_key(folder / "a.pub")), SettingsError, (b"0" * 40,)
    ),
    "allow-list": Decoder(_file("allowed/actor/a.pub", read_allowed), None, (b"0" * 40 + b"\n",)),
    "settings": Decoder(
        # PyYAML needs seconds for a thousand brackets; a few hundred are deep enough.
        _shortened(_file("run.yaml", lambda folder: load(folder / "run.yaml")), 700),
        SettingsError,
        (b"run:\n  name: r\n  model: m\nbroker: {max_attempts: 3, lease_timeout_s: 15.0}\n",),
    ),
}
