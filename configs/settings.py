"""The settings of a run: one frozen table per role, plus `run` for what roles share.

Owns names, types, defaults, ranges. Reading files, overrides and the wording of errors live in
`loader.py`. Two levels deep: `table.key`. A role is handed `run` and its own table only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .agreement import disagreements

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Endpoint = Annotated[str, Field(pattern=r"^tcp://.+:\d+$")]


class Table(BaseModel):
    """A settings table: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSettings(Table):
    """What all roles share. A process with other values is refused when it says HELLO."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run: its folder under `directory` and its key prefix in Redis."""
    directory: Path = Path("runs")
    """Where runs are kept; this run writes to `directory/name`."""
    seed: int = 0
    """Seed of the curriculum. The task of an id is a pure function of (seed, id)."""
    model: str
    """Hugging Face model directory or hub name. `init` alone means `<run folder>/init`, which
    `nyala init-model` makes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the published weights and of the actors' engines."""
    steps: Positive = 100
    """Batches to train in all."""
    environment: str = "reasoning_gym"
    """`reasoning_gym`, `calculator`, or `module:Class` of your own."""
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords for the environment, such as `dataset: spell_backward`."""
    reward: str | None = None
    """`path/to/file.py:function` or `module:function`; null means the environment's own score."""
    reward_timeout_s: Seconds = 30.0
    """A reward call that takes longer costs its episode an attempt."""
    group_size: Positive = 8
    """Episodes per prompt (GRPO-style baselines)."""
    groups_per_batch: Positive = 16
    """Groups one optimizer step trains on."""
    max_policy_lag: Annotated[int, Field(ge=0)] = 2
    """Most batches by which a token's policy may be older than the one that trains it;
    0 = synchronous."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt, tokens."""
    max_completion_tokens: Positive = 1024
    """Longest completion, all turns and environment tokens together, tokens."""
    temperature: Annotated[float, Field(gt=0, le=5)] = 1.0
    """Sampling temperature of training episodes; the learner applies the same."""
    eval_every: Annotated[int, Field(ge=0)] = 25
    """Batches between evaluations; 0 = only before the first and after the last."""
    eval_episodes: Annotated[int, Field(ge=0)] = 128
    """Held-out prompts per evaluation, sampled greedily; 0 = no evaluation."""

    @property
    def folder(self) -> Path:
        """Where this run keeps its files."""
        return self.directory / self.name

    @property
    def model_path(self) -> str:
        """The model to start from, with `init` resolved."""
        return str(self.folder / "init") if self.model == "init" else self.model


class BufferSettings(Table):
    """The Redis store."""

    url: str | None = None
    """`redis://[:password@]host:port/db`, `rediss://` (TLS), `unix://`, or
    `redis+sentinel://host:port,host:port/service/db`; null = `nyala up` starts a server of its
    own."""
    maxmemory_mb: Annotated[int, Field(ge=16)] = 1024
    """Memory limit of a server that `nyala up` starts, MiB."""
    pause_at_memory: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of Redis' maxmemory above which no lease is granted."""
    max_uncommitted_bytes: Positive = 512 * 2**20
    """Records of trained batches that Redis may hold until a checkpoint contains them, bytes; the
    learner checkpoints at once when there are more, or when Redis is 60 % full."""
    max_episode_bytes: Annotated[int, Field(ge=1024, le=16 * 2**20)] = 16 * 2**20
    """Largest episode record, bytes."""
    min_group_size: Positive = 2
    """A group that lost members to the dead letters trains with at least this many, else it is
    dropped."""
    margin: Annotated[float, Field(ge=1)] = 1.0
    """Admission margin for groups that are expected to be filtered."""
    on_stale: Literal["drop", "train"] = "drop"
    """What to do with a group older than `run.max_policy_lag` when it is claimed."""


class BrokerSettings(Table):
    """The server between actors and buffer."""

    endpoint: Endpoint = "tcp://127.0.0.1:5757"
    """Where the broker listens and actors connect. Port 0 lets `nyala up` choose a free one."""
    keys: Path | None = None
    """Folder of CURVE keys made by `nyala keys`; null means `<run folder>/keys`."""
    lease_timeout_s: Seconds = 15.0
    """A lease without a heartbeat for this long goes to another actor."""
    heartbeat_timeout_s: Seconds = 6.0
    """An actor silent for this long gets no new leases."""
    reap_every_s: Seconds = 1.0
    """Pause between two looks for expired leases."""
    max_attempts: Positive = 3
    """Attempts without progress after which a task goes to the dead letters."""
    max_data_failures: Positive = 3
    """Failures of the task itself (reward, environment, prompt) after which it does, too; progress
    does not refill this budget."""
    progress_timeout_s: Seconds = 120.0
    """A lease that brought no new tokens for this long is taken away, heartbeats or not."""
    max_message_bytes: Annotated[int, Field(ge=4096)] = 32 * 2**20
    """Largest message accepted from a peer, bytes; a longer one closes its connection."""
    long_poll_s: Seconds = 2.0
    """Longest time a lease call waits for work."""
    max_actors: Positive = 1024
    """Incarnations served at once."""
    max_actors_per_key: Positive = 1024
    """Of these, incarnations under one key; lower it where every actor has a key of its own."""
    max_inflight_mb_per_actor: Positive = 64
    """What one actor may have at the broker at once, MiB: unanswered requests, and unread replies
    of ten seconds. It is told to send the rest later."""
    other_endpoints: tuple[Endpoint, ...] = ()
    """More brokers of this run, over the same Redis and with the same key; an actor begins at any
    of them and goes to the next when one is silent."""


class ActorSettings(Table):
    """The processes that sample."""

    count: Annotated[int, Field(ge=0)] = 1
    """Actors that `nyala up` starts; more may join at any time."""
    engine: Literal["vllm", "torch"] = "vllm"
    """`vllm`, or `torch`: a small engine for macOS and quick tests."""
    in_process: bool | None = None
    """Run vLLM inside the actor's process; null = yes on a CPU, no (its core in processes of its
    own) on a GPU."""
    max_concurrent_episodes: Positive = 256
    """Episodes one actor generates at a time."""
    max_model_len: Positive | None = None
    """Longest sequence of the engine, tokens; null = prompt + completion limits of `run`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of the GPU's memory for the engine (GPU)."""
    kv_cache_gib: Positive = 1
    """Memory for the KV cache on a CPU, GiB."""
    tensor_parallel_size: Positive = 1
    """GPUs per actor."""
    threads: Positive = 1
    """OpenMP threads on a CPU; more than one spins when learner and actor share the cores."""
    heartbeat_s: Seconds = 2.0
    """Pause between heartbeats."""
    snapshot_s: Seconds = 1.0
    """Pause between snapshots of unfinished episodes; another actor continues from them after a
    crash."""
    drain_s: Seconds = 10.0
    """Time to give leases back after SIGTERM."""
    preemption: Literal["none", "aws", "gcp", "azure"] = "none"
    """Cloud whose metadata service is asked for preemption notices; a notice acts as SIGTERM."""
    eval_hold_s: Seconds = 10.0
    """Longest time an evaluation may hold back new weights."""
    weight_timeout_s: Seconds = 30.0
    """Time for one weight transfer before the actor pulls instead."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference in nats between the engine's log-probs and the learner's on the probe;
    null = 1e-3 for float32, 0.1 for bfloat16."""


class LearnerSettings(Table):
    """The process group that trains."""

    ranks: Positive = 1
    """Processes (GPUs) of the learner on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Batches of linear warm-up."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, over the rest of `run.steps`."""
    lr_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm above which gradients are scaled down."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How rewards of a group become advantages."""
    correction: Literal["none", "tis"] = "tis"
    """How pi/mu corrects for the gap between the actor's and the learner's policy."""
    surrogate: Literal["clip", "reinforce"] = "clip"
    """Surrogate objective: PPO clip with separate bounds, or plain policy gradient."""
    aggregation: Literal["token", "sequence", "dr_grpo"] = "token"
    """How token losses are averaged, always over the whole batch."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip bound: 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip bound: 1 + clip_high (DAPO clip-higher)."""
    rho_bar: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance ratio."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy in the objective."""
    microbatch_tokens: Positive = 16384
    """Tokens per forward pass."""
    checkpoint_every: Positive = 50
    """Batches between checkpoints."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints to keep."""
    threads: Positive = 1
    """Threads per rank on a CPU."""
    publish_every: Positive = 1
    """Batches between two publications of weights; at most `run.max_policy_lag` + 1."""
    publisher_endpoint: Endpoint = "tcp://127.0.0.1:0"
    """Where the weight publisher listens; port 0 = a free one."""
    broadcast: bool = True
    """Send weights over a process group (gloo, NCCL); false = actors pull."""
    broadcast_join_s: Seconds = 10.0
    """Time for the members of a weight group to join."""
    broadcast_send_s: Seconds = 30.0
    """Time for one broadcast; who has not confirmed by then is left out."""
    eval_timeout_s: Seconds = 120.0
    """Time after which an evaluation closes with what has arrived."""
    max_claim_attempts: Positive = 3
    """Starts of one batch before it is given up."""
    init_layers: Positive = 4
    """`nyala init-model`: layers of the character model."""
    init_width: Annotated[int, Field(ge=64, multiple_of=64)] = 128
    """`nyala init-model`: width of the character model; heads are 32 wide and come in pairs."""
    init_tied: bool = True
    """`nyala init-model`: share input and output embeddings."""
    warm_start_steps: Annotated[int, Field(ge=0)] = 0
    """`nyala init-model`: supervised steps on the environment's own answers; 0 = random weights."""
    warm_start_lr: Annotated[float, Field(gt=0)] = 1e-3
    """`nyala init-model`: peak learning rate of the supervised start."""
    warm_start_batch: Positive = 256
    """`nyala init-model`: answers per supervised step."""
    warm_start_echo: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`nyala init-model`: share of supervised examples that repeat the question instead of
    answering it. The model then knows both, and RL finds out which of the two is rewarded."""


class ConsoleSettings(Table):
    """What `nyala up` shows, and how it restarts what died."""

    refresh_s: Seconds = 0.5
    """Pause between two looks at the run."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts of one process within ten minutes before the run stops with an error."""
    stop_timeout_s: Seconds = 30.0
    """Time for a process to end cleanly before it is killed."""


class Settings(Table):
    """Everything one run needs to know."""

    run: RunSettings
    buffer: BufferSettings = BufferSettings()
    broker: BrokerSettings = BrokerSettings()
    actors: ActorSettings = ActorSettings()
    learner: LearnerSettings = LearnerSettings()
    console: ConsoleSettings = ConsoleSettings()

    @model_validator(mode="after")
    def _tables_agree(self) -> Settings:
        if wrong := disagreements(self):
            raise ValueError("; ".join(wrong))
        return self
