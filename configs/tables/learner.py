"""`learner`: the processes that train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Address, Endpoint, HttpEndpoint, Port, Positive, Seconds, Table


class LearnerSettings(Table):
    """The process group that trains."""

    ranks: Positive = 1
    """Processes (GPUs) of the learner on each of its machines."""
    min_ranks: Positive | None = None
    """Fewest ranks, of all machines, to go on with at the newest checkpoint when others are gone;
    null = they are waited for."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` = on GPUs if this machine has some."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Batches of linear warm-up."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, over the rest of `run.steps`."""
    lr_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay, as a share of `lr`."""
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """`adamw8bit` keeps the moments of matrices in a quarter of the bytes. `muon` steps along
    orthogonal matrices, with half of the moments to keep; embeddings, output layer and vectors keep
    AdamW. Rates are the same for all."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters (LoRA) beside the matrices of the layers, which are then all that is
    trained; 0 = the weights themselves are."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are multiplied with `lora_alpha` / `lora_rank`; null = twice the rank."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the optimizer, apart from the gradient."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm above which gradients are scaled down."""
    microbatch_tokens: Positive = 16384
    """Most tokens of a forward pass, as many as fit the memory. Episodes are packed into it without
    pads; loss and gradient do not depend on it. A longer episode has a pass of its own."""
    activation_checkpointing: Literal["none", "selective", "full"] | None = None
    """What a layer keeps for its backward pass: `none` = all, `selective` = matrix products and
    attention, `full` = its input alone, computing the rest again; null = `full` on a GPU above 1e9
    parameters or with `offload: [activations]`, else `none`."""
    offload: tuple[Literal["parameters", "activations"], ...] = ()
    """What lies in host memory instead of on the card: `parameters` = weights, their gradients and
    the optimizer's moments, which step on `learner.threads` threads; `activations` = what layers
    keep for their backward pass, with `activation_checkpointing: full`."""
    compile: bool = False
    """Compile each layer (torch.compile) but for its attention; the first batches take longer."""
    checkpoint_every: Positive = 50
    """Batches between checkpoints."""
    checkpoint_minutes: Annotated[float, Field(gt=0)] | None = None
    """Most minutes between checkpoints, whatever `checkpoint_every` says; None = as long as it
    takes."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints to keep."""
    keep_best: bool = False
    """Keep the checkpoint with the best held-out accuracy, too."""
    checkpoint_url: str | None = None
    """Where each checkpoint is copied before its batches are committed, as fsspec writes it:
    `s3://bucket/folder`, `gs://`, `az://` (extra `bucket`), `file:///folder`; a machine without
    checkpoints goes on from the newest there. null = nowhere."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait of a rank for the others before all of them end; a slow disk and a compilation
    must fit in."""
    threads: Positive = 1
    """Threads per rank on a CPU, and of what is offloaded to one."""
    profile_steps: Annotated[tuple[Positive, ...], Field(max_length=16)] = ()
    """Batches of which every rank writes a trace into `<run>/traces/`, such as `[3, 10]`; a traced
    batch takes longer."""
    publish_every: Positive = 1
    """Batches between two publications of weights; at most `run.max_policy_lag` + 1."""
    publisher_endpoint: Endpoint = "tcp://127.0.0.1:0"
    """Where the weight publisher listens; port 0 = a free one."""
    advertise: Address | None = None
    """Host, or host and port, under which actors reach the publisher where it is not its own:
    behind NAT, in a container. They pull then; groups would connect to its own address. null = its
    own."""
    broadcast: bool | None = None
    """Send weights over process groups (gloo, NCCL), which neither authenticate nor encrypt; false
    = actors pull over CURVE, null = groups if the publisher is on loopback or
    `run.trusted_network`."""
    sparse_weights: bool = False
    """Send actors that pull, and groups, only what has changed since their version, where that is
    shorter. Costs the publisher a copy of the weights, and a comparison for each version."""
    weight_store: str | None = None
    """Where each version is written too, for actors in other regions, as fsspec writes it:
    `s3://bucket/folder` (extra `bucket`), `file:///folder`, ...; null = nowhere. See
    `actors.pull_from`."""
    broadcast_ports: tuple[Port, Port] | None = None
    """First and last port of the learner's machine at which weight groups form, such as
    `[5760, 5779]`; null = any free one. What gloo and NCCL open themselves, on either side, is of
    the system's `net.ipv4.ip_local_port_range`."""
    broadcast_join_s: Seconds = 10.0
    """Time for the members of a weight group to join."""
    broadcast_send_s: Seconds = 30.0
    """Time for one broadcast; an actor that has not confirmed by then is left out."""
    eval_timeout_s: Seconds = 120.0
    """Time after which an evaluation closes with what has arrived, once actors sample."""
    max_claim_attempts: Positive = 3
    """Starts of one batch before it is given up."""
    metrics_endpoint: HttpEndpoint | None = None
    """Where rank 0 answers `/metrics`, as `broker.metrics_endpoint`."""
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
