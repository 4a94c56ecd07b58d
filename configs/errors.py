"""The tree of errors, one class per failure to act on; exit codes; values quoted in error texts.

NyalaError
├── SettingsError      a setting is wrong: names the key, the value and what is allowed
├── RecordError        an episode record or message is malformed
├── StoreError         the Redis store refused or cannot be reached
├── StoreUnfit         the Redis cannot hold a run: another one must be named
├── StoreUnreachable   Redis cannot be reached or is not ready: asking again may help
├── StoreRestarted     Redis began a new life: what it forgot has to be put right first
├── StoreRewound       Redis remembers less than this learner did: the same
├── LostLineage        a newer learner owns the run; this one must stop
├── RefusedError       the broker refused this peer; the text has the reason
├── DeadlineError      a wait ended without what it waited for
├── CheckpointError    a checkpoint is truncated, corrupt or of another run
├── OutOfMemory        a batch did not fit: the next start trains it in smaller pieces
├── BudgetSpent        the run's actors have cost as much as they may
├── DeterminismError   a run that is to be the same each time has lost a task
├── DivergedError      training went wrong again after as many rollbacks as are allowed
├── EngineError        the engine that samples died or cannot start
├── EngineNotStarted   it could not start: once more is worth a try
├── EngineUnfit        it cannot start on this machine or with this model: no restart mends that
├── EngineDied         it worked, and died or hangs: the actor has to be started again
├── RewardError        a reward function raised, returned nonsense or took too long
├── WeightsError       weights do not match their manifest
├── WeightsOverwritten they were written to while they were read: they are fetched again
└── MixedWeights       so were those that an engine loads in place: it stands until it has others
"""

from __future__ import annotations

import reprlib

FIRST_FREE_CODE = 10
"""Exit codes from here to 125 are left to users; those below are ours, those above the shell's."""


class NyalaError(Exception):
    """Base of all errors of this project."""


class SettingsError(NyalaError, ValueError):
    """A setting must be changed by the person who started the command."""


class RecordError(NyalaError, ValueError):
    """Bytes or values do not make a valid record or message."""


class StoreError(NyalaError):
    """The store refused an operation or cannot be reached."""


class StoreUnreachable(StoreError):
    """Redis is away, or not ready yet; the same call may succeed later."""


class StoreRestarted(StoreUnreachable):
    """Redis was restarted, or another server took over; this client may not work with it yet."""

    run_id: str
    """Id of the server that answers now."""


class StoreRewound(StoreError):
    """The store has lost what this learner wrote: its last seconds, or all."""


class StoreUnfit(StoreError, SettingsError):
    """The server that `buffer.url` names is of a kind that holds no run."""


class LostLineage(StoreError):
    """A newer learner has taken the run over."""


class RefusedError(NyalaError):
    """The broker does not serve this peer, or not this message."""

    def __init__(self, text: str, *, code: str = "") -> None:
        """Keep the refusal's code, by which programs decide."""
        super().__init__(text)
        self.code = code


class DeadlineError(NyalaError, TimeoutError):
    """A wait reached its deadline."""


class CheckpointError(NyalaError):
    """A checkpoint cannot be trusted."""


class OutOfMemory(NyalaError):
    """A batch did not fit into memory; the next life of the learner has a smaller budget."""


class BudgetSpent(NyalaError):
    """The actors of a run have cost the whole budget; its newest batch is in a checkpoint."""


class DeterminismError(NyalaError):
    """A run that is to be the same each time cannot be, because it has lost a task."""


class DivergedError(NyalaError):
    """Training does not recover by itself any more."""


class EngineError(NyalaError):
    """The engine died or cannot start."""


class EngineNotStarted(EngineError):
    """The engine could not start; memory that others held meanwhile may be free the next time."""


class EngineUnfit(EngineError):
    """The engine cannot start on this machine or with this model; a person has to act first."""


class EngineDied(EngineError):
    """The engine worked, and died or hangs; starting the actor again is enough."""


class RewardError(NyalaError):
    """A reward function failed on an episode."""


class WeightsError(NyalaError):
    """Weights do not agree with their manifest."""


class WeightsOverwritten(WeightsError):
    """Weights changed while an engine read them; the engine keeps the weights that it has."""


class MixedWeights(WeightsOverwritten):
    """Weights changed while an engine replaced its own; it waits for the next version."""


def exit_code(error: NyalaError) -> int:
    """Choose the exit code of a process that ends with `error`; `nyala up` acts on it.

    Returns:
        2 a person has to change something first, 3 another learner owns the run, 4 an actor lost
        its engine and has given its work back: start it again, 5 its engine could not start: once
        more at most; 1 starting it again may help.
    """
    if isinstance(error, EngineDied):
        return 4
    if isinstance(error, EngineNotStarted):
        return 5
    if isinstance(error, SettingsError | RefusedError | RewardError | EngineUnfit):
        return 2
    if isinstance(error, CheckpointError | DeterminismError | DivergedError | BudgetSpent):
        return 2
    return 3 if isinstance(error, LostLineage) else 1


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group that a person can act on, else its first."""
    ours, rest = group.split(NyalaError)
    error: BaseException = ours or rest or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --------------------------------------------------------------------------------------------------
# Values in the text of an error.

ITEMS_QUOTED = 4
"""Most items of a list or map that an error quotes; more would tell nothing more."""
LEAST_QUOTED = 16  # characters of such an item


def quoted(value: object, most: int = 80) -> str:
    """Return a value's repr; a long one without its middle, so that its quotes stay whole.

    Args:
        value: Any, of whatever size; no error of it gets out.
        most: Characters of it; a list or map has a few of its items, each with its share of them.

    Example:
        >>> print(quoted("twelve pencils", 12), quoted(["a", "b"]))
        'twe...ils' ['a', 'b']
    """
    brief = reprlib.Repr()
    brief.maxlevel = 2
    brief.maxother = brief.maxlong = most
    brief.maxstring = most if isinstance(value, str) else max(LEAST_QUOTED, most // ITEMS_QUOTED)
    brief.maxlist = brief.maxtuple = brief.maxset = brief.maxdict = ITEMS_QUOTED
    try:
        return brief.repr(value[: 2 * most] if isinstance(value, bytes) else value)
    except (ValueError, RecursionError):  # of a number of thousands of digits, say
        return type(value).__name__


# --------------------------------------------------------------------------------------------------
# Text from elsewhere, with what a terminal would obey written out.
#
# Names, reasons and errors may come from another machine: control characters, escape sequences and
# marks that turn the direction of writing are shown as `\x1b` or `\u202e`, never sent on.


def printable(text: str) -> str:
    r"""Return a text on one line; line ends are written out too.

    Example:
        >>> printable("red \x1b[31m")
        'red \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return a text with its lines; other control characters are written out."""
    return "\n".join(printable(line) for line in text.split("\n"))
