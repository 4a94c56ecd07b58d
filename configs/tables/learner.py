"""`learner`, `parallel`, `guards`: the processes that train, their groups, and bad batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Address, Endpoint, HttpEndpoint, Port, Positive, Seconds, SettingsTable


class LearnerSettings(SettingsTable):
    """The process group that trains."""

    ranks: Positive = 1
    """Processes (GPUs) of the learner on each of its machines.

    Set it to the cards that the learner has on each machine."""
    min_ranks: Positive | None = None
    """Fewest ranks, of all machines, with which the learner continues at the newest checkpoint when
    others are gone; null = it waits for them.

    Change it when training should continue without a machine that does not come back."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; `auto` = on GPUs if this machine has some.

    Set it to `cpu` when the cards are only for the actors."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate.

    The first to tune: raise it when the reward hardly moves, lower it when it collapses; ten times
    higher with adapters."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Batches of linear warm-up.

    Raise it when the first batches have large gradients."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, over the rest of `run.steps`.

    Change it when the end of a run is noisy."""
    lr_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay, as a share of `lr`.

    Set it to 0 to let the decay end at 0."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """`adamw8bit` keeps the moments of matrices in a quarter of the bytes. `muon` steps along
    orthogonal matrices and keeps half of the moments; embeddings, output layer and vectors keep
    AdamW. The same learning rates suit all.

    Set it to `adamw8bit` or `muon` when the optimizer's moments do not fit."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters (LoRA) beside the matrices of the layers; only the adapters are then
    trained. 0 = the weights themselves are trained.

    Raise it from 0 when the whole model does not fit, or to train quickly with little memory."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are multiplied with `lora_alpha` / `lora_rank`; null = twice the rank.

    Change it to keep the scale of another project."""
    base_dtype: Literal["float32", "bfloat16", "nf4"] | None = None
    """Format of the frozen model beside adapters: `nf4` = the matrices of the layers in 4
    bits, the rest in bfloat16; null = the dtype of forward passes, which rounds nothing.

    Set it to `nf4` when the frozen model does not fit."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the optimizer, apart from the gradient.

    Change it when weights grow over a long run."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment (mean of gradients).

    Rarely needs a change."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment (mean of squared gradients).

    Lower it to about 0.95 when gradients change quickly."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm above which gradients are scaled down.

    Lower it when single batches damage the policy, raise it when almost every gradient is scaled
    down."""
    microbatch_tokens: Positive = 16384
    """Most tokens of a forward pass, as many as fit the memory. Episodes are packed into it without
    padding; loss and gradient do not depend on it. A longer episode has a pass of its own.

    Lower it when the card's memory is exceeded, raise it when it is half empty."""
    activation_checkpointing: Literal["none", "selective", "full"] | None = None
    """Tensors that a layer keeps for its backward pass: `none` = all, `selective` = matrix products
    and attention, `full` = only its input, and the rest is computed again; null = `full` on a GPU
    above 1e9 parameters or with `offload: [activations]`, else `none`.

    Set it to `full` when activations do not fit, to `none` when memory is free, which is faster."""
    offload: tuple[Literal["parameters", "activations"], ...] = ()
    """Tensors in host memory instead of on the card: `parameters` = weights, their gradients and
    the optimizer's moments, with optimizer steps on `learner.threads` threads; `activations` = the
    tensors that layers keep for their backward pass, with `activation_checkpointing: full`.

    Change it when weights, moments or activations do not fit on the card."""
    compile: bool = False
    """Compile each layer (torch.compile) except its attention; the first batches take longer.

    Change it for a long run on a GPU."""
    checkpoint_every: Positive = 50
    """Batches between checkpoints.

    Lower it when a batch takes minutes, raise it when writing takes long."""
    checkpoint_minutes: Annotated[float, Field(gt=0)] | None = 10.0
    """Most minutes between checkpoints, whatever `checkpoint_every` says; null = no bound.

    Change it when batches take unequal time, and you know how much work may be lost."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints to keep.

    Raise it to go back further, lower it when the disk is small."""
    keep_batches: Annotated[int, Field(ge=0)] = 0
    """Newest batches whose records are kept as files in the run's folder, for `nyala replay`; it
    begins at a checkpoint, so keep at least `checkpoint_every`.

    Raise it to train the same batches again, to debug, to profile or to compare losses."""
    keep_best: bool = False
    """Keep the checkpoint with the best held-out score (`run.eval_metric`), too.

    Change it when you want the best model rather than the last."""
    checkpoint_url: str | None = None
    """Place to which each checkpoint is copied before its batches are committed, as fsspec writes
    it: `s3://bucket/folder`, `gs://`, `az://` (extra `bucket`), `file:///folder`; a machine without
    checkpoints resumes from the newest there. null = nowhere.

    Change it when the learner's disk may be lost."""
    exit_when_told: Annotated[int, Field(ge=0, le=125)] = 0
    """Exit code of a learner that was told to stop (SIGTERM, SIGINT) before its last batch. 0 also
    means the end of the run; with another code a scheduler knows that it should start the learner
    again.

    Change it for a scheduler that starts again only what ends with an error."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait of a rank for the others before all of them end; it must allow for a slow disk
    and a compilation.

    Raise it when a checkpoint or a compilation takes longer."""
    threads: Positive = 1
    """Threads per rank on a CPU, and for tensors that are offloaded to the CPU.

    Set it to the cores that a rank has to itself on a CPU, or for the offloaded optimizer; if
    another process uses one of these cores, two threads spin and take longer than one."""
    profile_steps: Annotated[tuple[Positive, ...], Field(max_length=16)] = ()
    """Batches of which every rank writes a trace into `<run>/traces/`, such as `[3, 10]`; a traced
    batch takes longer.

    Change it to see where a batch's time goes."""
    publish_every: Positive = 1
    """Batches between two publications of weights; at most `run.max_policy_lag` + 1.

    Raise it when publishing takes a large part of a batch."""
    publisher_endpoint: Endpoint = "tcp://127.0.0.1:0"
    """Address at which the weight publisher listens; port 0 = a free one.

    Change it when actors are on other machines, or a firewall wants a fixed port."""
    advertise: Address | None = None
    """Host, or host and port, at which actors reach the publisher if they cannot use its own
    address, such as behind NAT or in a container. Actors then pull, because groups would connect to
    its own address. null = its own.

    Change it when the learner is behind NAT or in a container."""
    broadcast: bool | None = None
    """Send weights over process groups (gloo, NCCL), which neither authenticate nor encrypt; false
    = actors pull over CURVE, null = groups if the publisher is on loopback or
    `run.trusted_network`.

    Set it to false to keep weights encrypted although the network is trusted, to true to require
    groups."""
    sparse_weights: bool = False
    """Send actors that pull, and groups, only the changes since their version, if these are
    shorter. Costs the publisher a copy of the weights, and a comparison for each version.

    Change it when the network is slow and the learning rate low."""
    broadcast_ports: tuple[Port, Port] | None = None
    """First and last port of the learner's machine at which weight groups form, such as `[5760,
    5779]`; null = any free one. Ports that gloo and NCCL open themselves, on either side, are from
    the system's `net.ipv4.ip_local_port_range`.

    Change it when a firewall is between learner and actors."""
    broadcast_join_s: Seconds = 10.0
    """Time for the members of a weight group to join.

    Raise it when members are slow to join, such as on busy machines."""
    broadcast_send_s: Seconds = 30.0
    """Time for one broadcast; an actor that has not confirmed by then is left out.

    Raise it for large models over a slow network."""
    eval_timeout_s: Seconds = 120.0
    """Time after which an evaluation closes with what has arrived, once actors sample.

    Raise it when answers of evaluations take longer."""
    max_claim_attempts: Positive = 3
    """Starts of one batch before it is given up.

    Set it to 1 to give up a batch that kills its learner at once."""
    metrics_endpoint: HttpEndpoint | None = None
    """Address at which rank 0 answers `/metrics`, as `broker.metrics_endpoint`.

    Change it when Prometheus reads your runs."""
    init_layers: Positive = 4
    """`nyala init-model`: layers of the character model.

    Change it for another size of that model."""
    init_width: Annotated[int, Field(ge=64, multiple_of=64)] = 128
    """`nyala init-model`: width of the character model; heads are 32 wide and come in pairs.

    Change it for another size of that model."""
    init_tied: bool = True
    """`nyala init-model`: share input and output embeddings.

    Set it to false for a separate output layer."""
    warm_start_steps: Annotated[int, Field(ge=0)] = 0
    """`nyala init-model`: supervised steps on the environment's own answers; 0 = random weights.

    Raise it when random weights never find a reward."""
    warm_start_lr: Annotated[float, Field(gt=0)] = 1e-3
    """`nyala init-model`: peak learning rate of the supervised start.

    Change it when that supervised start does not converge."""
    warm_start_batch: Positive = 256
    """`nyala init-model`: answers per supervised step.

    Lower it when it does not fit into memory."""
    warm_start_echo: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`nyala init-model`: share of supervised examples that repeat the question instead of
    answering it. The model then knows both, and RL finds out which of the two is rewarded.

    Raise it to begin with a model that has two habits, of which only one is rewarded."""


# --------------------------------------------------------------------------------------------------
# `parallel`: what the learner's ranks divide among themselves.


class ParallelSettings(SettingsTable):
    """Sizes of groups of the learner's ranks; `replicate` x `shard` x `tensor` = all of them."""

    replicate: Positive = 1
    """Copies of the sharded weights. Ranks of different copies exchange only gradients, so that
    gathering weights can stay within a machine.

    Set it to the number of machines, when gathering weights between them is slow."""
    shard: Positive | None = None
    """Ranks over which each copy is sharded (FSDP2); null = all that `replicate` leaves.

    Rarely needs a change: null fits."""
    sequence: Positive = 1
    """Ranks that share the tokens of each microbatch (Ulysses), for contexts that one card cannot
    hold: each has a part of the tokens, and within attention a part of the heads.

    Raise it when a single episode does not fit on one card."""
    tensor: Positive = 1
    """Ranks that divide every large matrix (tensor parallelism), for models whose gathered layers
    one card cannot hold, or whose microbatches should take less time.

    Raise it when a gathered layer does not fit on one card."""


# --------------------------------------------------------------------------------------------------
# `guards`: reactions of the learner when training goes wrong.

Share = Annotated[float, Field(gt=0, le=1)]


class GuardSettings(SettingsTable):
    """When the learner raises alerts, lowers its learning rate, rolls back or gives up."""

    max_skipped_in_a_row: Positive = 3
    """Batches in a row with a skipped optimizer step (loss or gradient not finite) after which the
    weights are set back to the newest checkpoint.

    Lower it when weights are damaged before the third, raise it when single batches fail
    harmlessly."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 3
    """Rollbacks in a run; instead of a further one the learner ends with an error.

    Set it to 0 to stop at once and investigate."""
    rollback_lr_factor: Share = 0.5
    """Factor of the learning rate at each rollback, for the rest of the run.

    Lower it when training diverges again after a rollback."""
    rollback_clip_factor: Share = 0.5
    """Factor of `algorithm.clip_low` and `clip_high` at each rollback.

    Lower it when training diverges again after a rollback."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """KL(pi || mu) of a batch, nats per token, above which the learning rate is lowered; null =
    never.

    Change it when single batches move the policy too far."""
    kl_lr_factor: Share = 0.5
    """Factor of the learning rate for each batch above `max_kl`.

    Lower it when the KL stays above `max_kl` for several batches."""
    kl_lr_floor: Share = 0.1
    """Lowest learning rate that `max_kl` can cause, as a share of the scheduled rate.

    Lower it when the KL stays above `max_kl` even at this rate."""
    kl_lr_recovery: Annotated[float, Field(ge=1)] = 1.1
    """Factor of the learning rate for each batch below `max_kl`, until it is the scheduled rate
    again.

    Lower it when the KL swings around `max_kl`."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Effective sample size of a batch, as a share of its tokens, below which an alert is
    raised; 0 = never.

    Change it when the alert comes too often, or too late, for your correction."""
    max_ratio_mean: Annotated[float, Field(gt=1)] | None = 2.0
    """Mean ratio pi/mu of a batch above which, or below 1 / which, an alert is raised.

    Change it when the alert comes too often, or too late."""
    max_ratio: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio pi/mu of a batch above which an alert is raised; null = never.

    Change it to be alerted of single tokens far from the policy that sampled them."""
