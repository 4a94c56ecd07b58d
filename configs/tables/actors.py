"""`actors`: the processes that sample; `fleet`: their number, and what they may cost."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Endpoint, HttpEndpoint, Positive, Seconds, SettingsTable

Money = Annotated[float, Field(gt=0)]
"""In a currency of the user's choice, the same everywhere."""
SITE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MOST_ON_A_GPU = 256
"""Episodes of one actor at a time where nothing is set; engines have as many by default."""
WeightSource = Literal["memory", "peers", "publisher"]


class ActorSettings(SettingsTable):
    """The processes that sample."""

    count: Annotated[int, Field(ge=0)] = 1
    """Actors that `nyala up` starts; more may join at any time.

    Change it when the learner waits for episodes and cores or cards are free."""
    teachers: Annotated[int, Field(ge=0)] = 1
    """Processes of each teacher that `nyala up` starts with `algorithm.teacher_in: actor`; more
    may join at any time.

    Raise it when finished episodes wait for their score (`unscored` in `nyala status`)."""
    engine: Literal["vllm", "torch", "auto"] = "vllm"
    """`vllm`; `torch`: a small engine that needs only torch; or `auto`: vLLM if it can start,
    otherwise the small one, with a warning that says what the machine lacks.

    Set it to `torch` for models of less than a million parameters and for quick tests, or to `auto`
    for settings that are used on several kinds of machines."""
    in_process: bool | None = None
    """Run vLLM inside the actor's process; null = yes on a CPU, no (its core in processes of its
    own) on a GPU, and with several workers.

    Set it to false on a CPU if a crash of the engine should leave its actor alive, to true on a
    GPU to debug the engine."""
    max_concurrent_episodes: Positive | Literal["auto"] | None = None
    """Episodes one actor generates at a time; null = 256, and on a CPU no more than a batch has, so
    that the first batch need not wait for episodes of later batches; `auto` = as many as the KV
    cache holds and as still make more tokens a second, found while the actor works (vLLM).

    Set it to `auto` when machines or answers differ, lower it when the engine preempts requests for
    lack of KV cache, raise it when its cards are not busy, or a CPU has cores to spare."""
    least_concurrent_episodes: Positive = 8
    """With `max_concurrent_episodes: auto`, the number to begin with, and the fewest.

    Raise it when the first minutes of an actor count."""
    most_concurrent_episodes: Positive = 1024
    """With `max_concurrent_episodes: auto`, the most.

    Lower it when so many episodes make policy lag too large."""
    max_episodes_in_flight: Positive | None = None
    """Episodes one actor works on at a time, those that wait for their environment included; null =
    hardly more than it generates.

    Change it when steps of the environment take long and the engine idles meanwhile."""
    environment_workers: Positive = 16
    """Threads in which one actor calls environments without `async` methods; a class that is not
    thread-safe is instantiated once for each.

    Change it when an environment without `async` methods waits for others, such as a database, and
    episodes queue for it."""
    environment_timeout_s: Seconds = 30.0
    """Longest time of a step of the environment; a longer one costs its episode an attempt.

    Raise it when a correct step of your environment takes longer than this."""
    max_model_len: Positive | None = None
    """Longest sequence of the engine, tokens; null = prompt + completion limits of `run`.

    Rarely needs a change: the limits of `run` decide."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of the GPU's memory for the engine (GPU); with `kv_cache_gib` only the share that must
    be free at its start.

    Lower it when something else needs the card, raise it when the engine has the card alone and the
    KV cache is full."""
    kv_cache_gib: Positive | None = None
    """Memory for the KV cache, GiB; null = 1 on a CPU, and on a GPU the memory that the engine
    measures as free at its start: set it if learner and actor share a card.

    Change it when learner and actor share a card, and for long answers on a CPU."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """KV cache of running requests when new weights come: `keep`, or `recompute` it with them, so
    that every later token is the new policy's alone, at the price of one prefill each.

    Set it to `recompute` when log-probs of episodes that saw a swap drift from the learner's
    (`lagged_logprob_diff_mean` beside `lag0_logprob_diff_mean`)."""
    tensor_parallel_size: Positive = 1
    """GPUs per actor; on a CPU, processes that share the model.

    Raise it when the model does not fit on one card."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, named as in its `EngineArgs`, such as
    `{max_num_batched_tokens: 8192}`; those that would make log-probs, weights or versions inexact
    are refused.

    Change it for an option of vLLM that has no setting here."""
    threads: Positive = 1
    """OpenMP threads on a CPU; more than one spins when learner and actor share the cores.

    Change it when one actor has several cores to itself."""
    reward_workers: Positive = 1
    """Batches of finished episodes that reward functions judge at a time, in a process for each
    function.

    Raise it when judging takes longer than sampling."""
    reward_memory_mb: Annotated[int, Field(ge=64)] | None = 4096
    """Memory that one process of a reward function may allocate (Linux), MiB; null = no limit.

    Change it when a reward function needs more, such as for a model of its own."""
    reward_retries: Annotated[int, Field(ge=0)] = 1
    """How often an episode is judged again on the same actor after its reward failed, before that
    counts as a failure of the task.

    Raise it when a reward asks a service that fails now and then."""
    heartbeat_s: Seconds = 2.0
    """Pause between heartbeats.

    Change it together with `broker.heartbeat_timeout_s`, which has to stay several times as
    long."""
    snapshot_s: Seconds = 1.0
    """Pause between snapshots of unfinished episodes; another actor continues from them after a
    crash.

    Lower it when actors are often killed and tokens are expensive, raise it when the broker is
    busy."""
    metrics_endpoint: HttpEndpoint | None = None
    """Address at which an actor answers `/metrics`, as `broker.metrics_endpoint`; of several actors
    that one command starts, each has the next port.

    Change it when Prometheus reads your runs."""
    drain_s: Seconds = 10.0
    """Time to give leases back after SIGTERM, and for a host of agents the time in which its
    conversations may still end.

    Lower it to what a scheduler grants between SIGTERM and SIGKILL."""
    exit_when_told: Annotated[int, Field(ge=0, le=125)] = 0
    """Exit code of an actor that was told to stop (SIGTERM, SIGINT, a preemption notice). 0 also
    means the end of the run; with another code a scheduler knows which actors to start again.

    Change it for a scheduler that starts again only what ends with an error."""
    preemption: Literal["none", "aws", "gcp", "azure"] = "none"
    """Cloud whose metadata service is polled for preemption notices; a notice acts as SIGTERM.

    Change it on spot or preemptible machines of that cloud."""
    eval_hold_s: Seconds = 10.0
    """Longest time an evaluation may hold back new weights.

    Raise it when answers of evaluations take longer, so that one version answers them all."""
    weight_timeout_s: Seconds = 30.0
    """Longest wait for the next 4 MiB of a weight transfer, and for a whole broadcast, after which
    the actor pulls; the engine's work on the bytes is not counted.

    Raise it for a link below 140 kB/s, or for broadcasts of large models."""
    share_endpoint: Endpoint | None = None
    """Address at which an actor shares the weights that it pulls, so that not all actors pull from
    the learner's machine; port 0 = a free one, null = none. Its machine needs `keys/allowed`.

    Change it when many actors pull, and the learner's network is their bottleneck."""
    site: Annotated[str, Field(pattern=SITE)] | None = None
    """Name of the place where this actor is, such as a region: the actors of a site fetch each
    version, whole or as a sparse update, only once from the learner's machine and take it from each
    other. Needs `actors.share_endpoint`, and no copy of `keys/allowed`.

    Change it for actors behind a slow or expensive link to the learner, with a different name for
    each place."""
    pull_from: Annotated[tuple[WeightSource, ...], Field(min_length=1)] = (
        "memory",
        "peers",
        "publisher",
    )
    """Sources of weights, in order: the publisher's memory (for actors of its machine and user,
    which are then in no weight group), actors that share weights, and the publisher, from which the
    first actor takes each version.

    Change it when an actor on the learner's machine should take weights as an actor on another
    machine does."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference in nats between the engine's log-probs and the learner's on the probe;
    null = three times the effect of the learner's own rounding on average, six times that on one
    token, and never less than 5e-5 and 5e-4 for float32, 5e-3 and 5e-2 for bfloat16.

    Change it when an engine with kernels or a precision of its own is refused, and you accept its
    difference."""

    @property
    def slots(self) -> int:
        """Most episodes that one actor ever generates at a time; where it is null, on a GPU."""
        number = self.max_concurrent_episodes
        if number == "auto":
            return self.most_concurrent_episodes
        return MOST_ON_A_GPU if number is None else number


class FleetSettings(SettingsTable):
    """Bounds of `nyala_actors_wanted`, and a budget."""

    min_actors: Positive = 1
    """Fewest actors that the run wants; before the first batch this many, or `actors.count`.

    Change it when a scheduler starts actors by that number, and a few should always run."""
    max_actors: Positive | None = None
    """Most actors that the run wants; null = `broker.max_actors`.

    Change it when there are no more machines, or no more should be paid for."""
    learner_nodes: Positive = 1
    """Machines of the learner, each with `learner.ranks` processes, in recipes for Kubernetes.

    Change it when the model, or its batches, need more cards than a machine has."""
    price_per_actor_hour: Money | None = None
    """Price of an actor in an hour, in any currency; null = costs are not counted.

    Change it when the run's cost should be in its figures."""
    max_per_hour: Money | None = None
    """Most that all actors may cost in an hour, which bounds the number of actors that the run
    wants. Needs `price_per_actor_hour`.

    Change it to limit the rate of spending."""
    max_total: Money | None = None
    """Most that all actors of the run may cost; then the learner checkpoints and ends with exit
    code 2. Needs `price_per_actor_hour`.

    Change it when the run has a budget."""
