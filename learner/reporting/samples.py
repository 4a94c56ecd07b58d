"""Kept episodes: their lines in `samples.jsonl`, and that file with its older parts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from buffer.record.episode import Completion, Episode
from configs import durable

# --------------------------------------------------------------------------------------------------
# A kept episode as a line of `samples.jsonl`: its text, its reward, and where it comes from.
#
# Producer: the learner. Consumer: `nyala samples`, and whoever reads JSON. Loads without torch.

By: TypeAlias = Literal["policy", "environment"]


class Origin(NamedTuple):
    """Origin of an episode, which its record does not state."""

    step: int
    """The batch that trained it, or the batches trained by the policy that was evaluated."""
    lineage: int
    """Lineage of the learner that trained or evaluated it."""
    environment: str
    sample: int | None = None
    """Number of the answer in an evaluation; 0 = the greedy one."""


class SampleTurn(msgspec.Struct, omit_defaults=True):
    """A stretch of the completion that one side wrote."""

    by: By
    text: str
    """Special tokens included."""
    tokens: int
    branch: int | Literal["root"] | None = None
    """Where a branch begins: tokens of the completion up to the one that it follows, 0 = it follows
    the prompt, or `root` = it follows nothing; None = the turn follows the one before."""

    @property
    def place(self) -> str:
        """Say where a branch begins."""
        return "root" if self.branch == "root" else f"branch from token {self.branch}"


class SampleLine(msgspec.Struct):
    """One episode as a line of the samples' files."""

    step: int
    lineage: int
    kind: Literal["train", "eval"]
    environment: str
    sample: int | None
    group: int
    task: int
    question: str
    """Short digest of the prompt's tokens: the same question has the same one at any step."""
    prompt: str
    turns: list[SampleTurn]
    reward: float
    """Reward as it is trained, after weights and punishments."""
    parts: dict[str, float]
    metrics: dict[str, float]
    """Metrics of the environment."""
    finish: str
    actor: str
    versions: list[tuple[int, int, int]]
    """(lineage, step, first token) of each policy that sampled a stretch."""
    logprobs: str
    """log mu of the completion's tokens, nats: float16, little-endian, base64."""
    trained_tokens: int
    started: float
    finished: float
    notes: dict[str, str]
    """Small texts that the actor sent along, such as the right answer."""

    @property
    def text(self) -> str:
        """The whole text of the completion, with a line where a branch begins."""
        return "".join(
            turn.text if turn.branch is None else f"\n[{turn.place}]\n{turn.text}"
            for turn in self.turns
        )

    @property
    def headings(self) -> list[str]:
        """Name the writer of each turn; where there are branches, also its tokens and place."""
        if all(turn.branch is None for turn in self.turns):
            return [turn.by for turn in self.turns]
        headings, end = [], 0
        for turn in self.turns:
            place = "" if turn.branch is None else f", {turn.place}"
            headings.append(f"{turn.by}, tokens {end + 1} to {end + turn.tokens}{place}")
            end += turn.tokens
        return headings

    @property
    def tokens(self) -> int:
        """Tokens of the completion."""
        return sum(turn.tokens for turn in self.turns)


def sample_line(
    origin: Origin, episode: Episode, decode: Callable[[Sequence[int]], str]
) -> SampleLine:
    """Write an episode as a line.

    Args:
        origin: Origin of the episode.
        episode: Episode as it was trained, or as it answered an evaluation.
        decode: Text of tokens.
    """
    completion = episode.completion
    return SampleLine(
        step=origin.step,
        lineage=origin.lineage,
        kind="train" if episode.purpose == "train" else "eval",
        environment=origin.environment,
        sample=origin.sample,
        group=episode.group_id,
        task=episode.task_id,
        question=hashlib.blake2b(episode.prompt_ids.tobytes(), digest_size=4).hexdigest(),
        prompt=_text(episode.prompt_ids.tolist(), decode),
        turns=[
            SampleTurn(by, _text(token_ids, decode), len(token_ids), branch)
            for by, token_ids, branch in _turns(completion)
        ],
        reward=float(episode.reward),
        parts=episode.reward_parts,
        metrics=episode.environment_metrics,
        finish=episode.finish_reason,
        actor=episode.incarnation,
        versions=[
            (span.version.lineage, span.version.step, span.start) for span in completion.versions
        ],
        logprobs=_packed(completion),
        trained_tokens=completion.num_trained,
        started=episode.started_at,
        finished=episode.finished_at,
        notes=episode.metadata,
    )


def logprobs_of(line: SampleLine) -> list[float]:
    """Read the log-probs of a line.

    Raises:
        ValueError: The log-probs are damaged.
    """
    packed = base64.b64decode(line.logprobs, validate=True)
    return [round(value, 4) for value in np.frombuffer(packed, dtype="<f2").tolist()]


def _text(token_ids: list[int], decode: Callable[[Sequence[int]], str]) -> str:
    try:
        return decode(token_ids)
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        # Tokens of evaluations and of waiting units have not been compared with the vocabulary.
        return f"[{len(token_ids)} tokens that the tokenizer refuses: {error}]"


def _packed(completion: Completion) -> str:
    # The least that a float16 holds: JSON readers would have to know infinities.
    bounded = np.maximum(completion.behaviour_logprobs, np.finfo(np.float16).min)
    return base64.b64encode(bounded.astype("<f2").tobytes()).decode()


def _turns(
    completion: Completion,
) -> Iterator[tuple[By, list[int], int | Literal["root"] | None]]:
    """Split a completion where the writer changes or a branch begins."""
    branches: dict[int, int | Literal["root"]] = {
        start: "root" if parent is None else parent for start, parent in completion.branches
    }
    token_ids, mask = completion.token_ids, completion.loss_mask
    if not mask.any():  # overlong filtering masks every token, whoever wrote it
        mask = np.ones_like(mask)
    ends = sorted({*(np.flatnonzero(np.diff(mask)) + 1).tolist(), *branches, len(token_ids)})
    start = 0
    for end in ends:
        if end > start:
            by: By = "policy" if mask[start] else "environment"
            yield by, token_ids[start:end].tolist(), branches.get(start)
        start = end


# --------------------------------------------------------------------------------------------------
# The files of kept episodes: `samples.jsonl`, and its older parts, compressed.
#
#     append -> samples.jsonl -(16 MiB)-> samples-00001.jsonl -> samples-00001.jsonl.gz -> removed
#
# One process writes, any number read meanwhile. Together the files stay below a number of bytes:
# the oldest parts go first, but for the first of all, which has the beginning of the run. A resume
# removes the lines of later steps, so that the files hold a single history and a batch that is
# trained again is there once. Loads without torch.

NAME = "samples"
PART_BYTES = 16 * 2**20
MODE = 0o600
LEVEL = 6  # of gzip: 0.4 s for a part; 9 takes three times as long for 1 % less
TRIES = 5  # of opening all files, between two of which a part may be compressed or removed


_File: TypeAlias = BufferedReader | gzip.GzipFile


class _Head(msgspec.Struct):
    """The part of a line that a resume reads."""

    step: int
    kind: str


class SampleFiles:
    """Appends lines, compresses what is old, and keeps all of it below `max_bytes`."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._current = folder / f"{NAME}.jsonl"
        self._max_bytes = max_bytes
        self._part_bytes = min(PART_BYTES, max_bytes // 8)

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps, and damaged ones; finish what a killed process began."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob(f".{NAME}*.jsonl*"):
            unfinished.unlink()
        self._compress()
        self._begin()
        for path in reversed(sample_paths(self._folder)):
            lines = _lines(path)
            heads = [_head(line) for line in lines]
            kept = [
                line
                for line, head in zip(lines, heads, strict=True)
                if head is not None and head.step <= step and line.endswith(b"\n")
            ]
            if len(kept) < len(lines):
                content = b"".join(kept)
                packed = path.suffix == ".gz"
                content = gzip.compress(content, LEVEL) if packed else content
                durable.replace_file(path, content, mode=MODE)
            elif any(head is not None and head.kind == "train" for head in heads):
                return  # batches are in order, so what is older is of earlier steps

    def append(self, lines: bytes) -> None:
        """Append whole lines, and begin a new part where the file is full."""
        with self._current.open("ab") as file:
            file.write(lines)
            size = file.tell()
        if size >= self._part_bytes:
            numbers = [_number(path) for path in _parts(self._folder)]
            part = self._folder / f"{NAME}-{max(numbers, default=0) + 1:05d}.jsonl"
            self._current.rename(part)
            self._compress()
            self._begin()
            self._trim()

    def _begin(self) -> None:
        """Make the file of new lines, readable only by this user: it holds people's questions."""
        self._current.touch(mode=MODE)

    def _compress(self) -> None:
        for part in sorted(self._folder.glob(f"{NAME}-*.jsonl")):
            packed = gzip.compress(part.read_bytes(), LEVEL)
            durable.replace_file(part.with_name(f"{part.name}.gz"), packed, mode=MODE)
            part.unlink()

    def _trim(self) -> None:
        """Leave room for two parts that are not compressed."""
        parts = _parts(self._folder)
        room = self._max_bytes - 2 * self._part_bytes
        sizes = {path: path.stat().st_size for path in parts}
        for path in [*parts[1:], *parts[:1]]:
            if sum(sizes.values()) <= room:
                return
            path.unlink()
            del sizes[path]


def sample_paths(folder: Path) -> list[Path]:
    """List the files of a run's samples, the oldest first."""
    current = folder / f"{NAME}.jsonl"
    return [*_parts(folder), *([current] if current.exists() else [])]


def read_samples(folder: Path) -> Iterator[SampleLine]:
    """Read all samples of a run, the oldest first, while it may be writing.

    A line that a crash or the disk damaged is left out. Without files there is no sample.
    """
    for file in _open_all(folder):
        with file, suppress(EOFError, OSError, zlib.error):
            for line in file:
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    yield _LINES.decode(line)


def encoded(lines: list[SampleLine]) -> bytes:
    """Write lines as bytes."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


_LINES = msgspec.json.Decoder(SampleLine)
_HEADS = msgspec.json.Decoder(_Head)


def _open_all(folder: Path) -> list[_File]:
    """Open the files of one moment: none is compressed or removed in between."""
    for _ in range(TRIES):
        paths = sample_paths(folder)
        files: list[_File] = []
        with suppress(FileNotFoundError):
            files = [_opened(path) for path in paths]
        if len(files) == len(paths) and sample_paths(folder) == paths:
            return files
        for file in files:
            file.close()
    return []


def _opened(path: Path) -> _File:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parts(folder: Path) -> list[Path]:
    """List older parts in order; a part that is being compressed is listed once."""
    parts = {_number(path): path for path in sorted(folder.glob(f"{NAME}-*.jsonl"))}
    parts |= {_number(path): path for path in sorted(folder.glob(f"{NAME}-*.jsonl.gz"))}
    return [parts[number] for number in sorted(parts)]


def _number(path: Path) -> int:
    digits = path.name.removeprefix(f"{NAME}-").partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _lines(path: Path) -> list[bytes]:
    lines: list[bytes] = []
    with _opened(path) as file, suppress(EOFError, zlib.error):
        lines.extend(file)
    return lines


def _head(line: bytes) -> _Head | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _HEADS.decode(line)
    return None
