"""Memory of the learner on one card, computed from settings and the model's `config.json`.

Checks of a start refuse a run that does not fit, `nyala up` prints the figures, and `nyala new`
fits settings to them.

FSDP2 shards weights, gradients and moments over the ranks of `parallel.shard`. A rank has the
activations of its own tokens, its part of a microbatch under `parallel.sequence`:

    all the time             float32 weights, gradients and the optimizer's moments, a rank's share;
                             a frozen model in `learner.base_dtype`
    the backward pass begins the activations of all layers, of the policy or of a critic with
                             passes of its own, whichever takes more; gathered weights, workspaces
                             of cuBLAS; in addition
        of the loss          a chunk of logits
        of the last layer    recomputed values, and the gradients of its activations
    the backward pass ends   the embeddings' whole gradient, and its float32 copies to be reduced
    a publication            the largest tensor, whole

Whole weights and gradients stay on a card until the end of an optimizer step if they are a small
part of its memory (`learner/model/memory_rules.py`). The total is what is there all the time, which
`learner.offload` can place in host memory, and the largest of the other three cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from configs.errors import SettingsError
from configs.machine import query_gpus
from configs.settings import CriticSettings, LearnerSettings, RunSettings, Settings
from configs.validation.learner import layout_of
from learner.model.memory_rules import (
    BLOCK,
    CHUNK_SIZES,
    base_dtype,
    default_checkpointing,
    host_share,
    reduces_once,
)

from .decoder_sizes import ModelShape, itemsize_of

GIB = 2**30
BLOCKS_ALIVE = 3 / 16
"""Part of a chunk that is in float32 at a time: three blocks of a sixteenth."""
WORKSPACES = 2 * 32 * 2**20
"""Bytes of cuBLAS for the threads of the forward and the backward pass, from Hopper on."""
LAYERS_COPIED = 3
"""Layers whose inputs are on the card or being copied when activations are offloaded."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes on each card, and the settings that they come from."""

    ranks: int
    on_gpu: bool
    kind: str
    """`learner.activation_checkpointing`, its default filled in."""
    tokens: int
    """Tokens of a microbatch, which has no more than a batch."""
    critic_tokens: int | None
    """Tokens of a critic's microbatch, where its passes take the most; else None."""
    states: Mapping[str, int]
    """What is there all the time."""
    step: Mapping[str, int]
    """What is there when the backward pass begins."""
    loss: int
    """Bytes in addition to `step` while the loss is computed."""
    layer: int
    """Bytes in addition to `step` while a layer is differentiated."""
    reduction: int
    """Bytes when the backward pass ends."""
    publication: int
    host: Mapping[str, int]
    """What is in host memory, for each card."""
    has_wide_base: bool = False
    """Whether there is a frozen model that is not in 4 bits."""
    scoring: int = 0
    """Bytes while a teacher scores a microbatch."""

    @property
    def total(self) -> int:
        """The most bytes at a time."""
        most = max(self._at_once, self.reduction, self.publication, self.scoring)
        return sum(self.states.values()) + most

    @property
    def _at_once(self) -> int:
        """The most bytes that a microbatch takes."""
        return sum(self.step.values()) + max(self.loss, self.layer)

    def lines(self) -> list[str]:
        """Write the figures, one on each line."""
        rows = {
            **self.states,
            **self.step,
            "then a chunk of logits": self.loss,
            "or, of one layer, what is computed again and gradients": self.layer,
            "or, as the backward pass ends": self.reduction,
            "or, the largest tensor published": self.publication,
            "or, while a teacher scores": self.scoring,
            "at most at a time": self.total,
        }
        place = "on each of {} card(s)" if self.on_gpu else "on the CPU, for each of {} rank(s)"
        head = (
            f"memory of the learner {place.format(self.ranks)}, computed: microbatches of at most "
            f"{self.tokens} tokens, activation_checkpointing {self.kind}"
        )
        if self.critic_tokens is not None:
            head += f"; the critic's, of at most {self.critic_tokens} tokens, take the most"
        lines = [head, *table_of_sizes(rows)]
        if self.host:
            lines += ["in host memory, for each card:", *table_of_sizes(self.host)]
        return lines

    def check_fit(self, card_bytes: int) -> None:
        """Refuse a card that is too small.

        Raises:
            SettingsError: The card is too small.
        """
        if self.total <= card_bytes:
            return
        raise SettingsError(
            f"the learner must fit {card_bytes / GIB:.1f} GiB on each card, got "
            f"{self.total / GIB:.1f} GiB (computed, of which {sum(self.states.values()) / GIB:.1f} "
            f"GiB weights, gradients and moments); {self._way_out()}"
        )

    def with_teachers(self, settings: Settings, configs: Sequence[Mapping[str, Any]]) -> CardMemory:
        """Add the frozen teachers that the learner loads.

        Args:
            settings: Settings of the run.
            configs: Configuration of each teacher. A size that one lacks raises `KeyError`.
        """
        if not configs:
            return self
        layout = layout_of(settings.parallel, self.ranks)
        shapes = [ModelShape.from_config(config).divided(layout.tensor) for config in configs]
        weights = sum(4 * -(-shape.parameters // layout.shard) for shape in shapes)
        itemsize = 2 if self.on_gpu and settings.run.dtype == "bfloat16" else 4
        tokens = -(-self.tokens // layout.sequence)
        is_offloaded = self.on_gpu and "parameters" in settings.learner.offload
        taken = {"weights of the teachers": weights}
        scoring = max(
            itemsize * (2 * shape.layer_parameters + shape.root_parameters)
            + tokens * (shape.kept("none", itemsize) + itemsize * shape.width)
            + _loss(settings.run, shape, itemsize, on_gpu=self.on_gpu)
            for shape in shapes
        )
        if is_offloaded:
            return replace(self, scoring=scoring, host={**self.host, **taken})
        return replace(self, scoring=scoring, states={**self.states, **taken})

    def _way_out(self) -> str:
        largest_state = sum(self.states.values()) > self._at_once
        if self.kind != "full" and not largest_state:
            return "set learner.activation_checkpointing: full"
        if largest_state and self.has_wide_base:
            return "set learner.base_dtype: nf4"
        if largest_state:
            return (
                f"set learner.ranks above {self.ranks}, or learner.offload: [parameters], or "
                "choose a smaller model"
            )
        name = "learner" if self.critic_tokens is None else "critic"
        return (
            f"set {name}.microbatch_tokens below {self.critic_tokens or self.tokens}, and with it "
            "run.max_completion_tokens where one episode may have as many"
        )


def table_of_sizes(rows: Mapping[str, int]) -> list[str]:
    """Write name -> bytes as lines; sizes that would be shown as 0 are left out."""
    shown = {name: f"{size / GIB:.2f}" for name, size in rows.items()}
    return [f"  {text:>8} GiB  {name}" for name, text in shown.items() if text != "0.00"]


def card_memory(
    settings: Settings, config: Mapping[str, Any], *, on_gpu: bool, card_bytes: int | None = None
) -> CardMemory:
    """Compute the memory of the learner on each card.

    Args:
        settings: Settings of the run.
        config: Configuration of its model. A size that it lacks raises `KeyError`.
        on_gpu: Whether it trains on a GPU, whose defaults and `run.dtype` then apply.
        card_bytes: Memory of the GPU if it is known: some steps keep more if there is room.
    """
    run, learner = settings.run, settings.learner
    whole, layout = ModelShape.from_config(config), layout_of(settings.parallel, learner.ranks)
    shape = replace(whole.divided(layout.tensor), is_fused=whole.is_fused and on_gpu)
    itemsize = 2 if on_gpu and run.dtype == "bfloat16" else 4
    learners = _learners(settings)
    states, host = _place_states(settings, shape, itemsize, shard=layout.shard, on_gpu=on_gpu)
    kinds = [_checkpointing(model, whole, on_gpu=on_gpu) for model in learners]
    shapes = shape, replace(shape, is_fused=False)  # a critic's norms are no kernels
    passes = [
        _passes(run, model, size, kind, itemsize, sequence=layout.sequence, on_gpu=on_gpu)
        for model, size, kind in zip(learners, shapes, kinds, strict=False)
    ]
    largest = max(passes, key=lambda one: one.activations + one.hidden + one.layer)
    step = {
        "activations": largest.activations,
        "hidden states": largest.hidden,
        "gathered weights, and the output layer's gradient": _gathered(settings, shape, itemsize),
    }
    step |= _copies(settings, shape, kinds[0], itemsize)
    reduction = _reduction(settings, shape, layout.shard, itemsize)
    if on_gpu:
        step["what cuBLAS works in"] = WORKSPACES
        reduction += WORKSPACES
    if in_host := max(one.in_host for one in passes):
        host = {"activations": in_host, **host}
    is_offloaded = on_gpu and any("parameters" in model.offload for model in learners)
    memory = (card_bytes or 0) if on_gpu else host_share(learner.ranks)
    held = _held(settings, shape, itemsize, layout.tensor, memory, is_offloaded=is_offloaded)
    if held:
        step["all weights and gradients, until these are reduced"] = held
        reduction += held
    elif is_offloaded:
        layer_bytes = shape.layer_bytes(_base(learners[-1], itemsize))
        step["weights on their way from host memory"] = -(-2 * layer_bytes // layout.shard)
    return CardMemory(
        ranks=learner.ranks,
        on_gpu=on_gpu,
        kind=kinds[0],
        tokens=passes[0].tokens,
        critic_tokens=None if largest is passes[0] else largest.tokens,
        states=states,
        step=step,
        loss=_loss(run, shape, itemsize, on_gpu=on_gpu),
        layer=largest.layer,
        reduction=reduction,
        publication=whole.vocabulary * whole.width * (2 if run.dtype == "bfloat16" else 4),
        host=host,
        has_wide_base=bool(learner.lora_rank) and learner.base_dtype != "nf4",
    )


def _checkpointing(learner: LearnerSettings, shape: ModelShape, *, on_gpu: bool) -> str:
    """Return `learner.activation_checkpointing` with its default filled in."""
    if learner.activation_checkpointing is not None:
        return learner.activation_checkpointing
    offloads = "activations" in learner.offload
    return default_checkpointing(shape.parameters, on_gpu=on_gpu, is_offloaded=offloads)


def _kept(
    learner: LearnerSettings, shape: ModelShape, kind: str, itemsize: int, longest: int
) -> tuple[int, int]:
    """Return the bytes that a layer keeps of a token, and those that it recomputes."""
    is_fused = learner.compile or shape.is_fused
    kept, plain = (
        shape.kept(name, itemsize, longest, rank=learner.lora_rank, is_fused=is_fused)
        for name in (kind, "none")
    )
    # With `selective`, what is kept is not recomputed.
    return kept, {"none": 0, "full": plain}.get(kind, plain - kept)


class _Passes(NamedTuple):
    """Tokens and bytes of the passes of one model; `layer` while a layer is differentiated."""

    tokens: int
    activations: int
    hidden: int
    layer: int
    in_host: int


def _passes(
    run: RunSettings,
    learner: LearnerSettings,
    shape: ModelShape,
    kind: str,
    itemsize: int,
    *,
    sequence: int,
    on_gpu: bool,
) -> _Passes:
    """Compute what the passes of a model take on a rank that has `1 / sequence` of the tokens."""
    longest = run.max_prompt_tokens + run.max_completion_tokens
    group = run.max_prompt_tokens + run.group_size * run.max_completion_tokens  # one prompt
    tokens = max(min(learner.microbatch_tokens, run.groups_per_batch * group), longest)
    own_tokens = -(-tokens // sequence)
    kept, again = _kept(learner, shape, kind, itemsize, longest)
    activations = own_tokens * shape.layers * kept
    is_offloaded = on_gpu and "activations" in learner.offload
    return _Passes(
        tokens,
        activations * LAYERS_COPIED // shape.layers if is_offloaded else activations,
        hidden=own_tokens * shape.width * (4 + 3 * itemsize),
        layer=own_tokens * (again + itemsize * (3 * shape.inner + 2 * shape.width)),
        in_host=activations if is_offloaded else 0,
    )


def _learners(settings: Settings) -> list[LearnerSettings]:
    """List the settings of the policy's passes, and those of a critic's own."""
    learner, critic = settings.learner, settings.critic
    if critic.kind != "model":
        return [learner]
    changed = critic.model_dump(include={"microbatch_tokens", "offload"}, exclude_none=True)
    return [learner, learner.model_copy(update={**changed, "lora_rank": 0})]


def _gathered(settings: Settings, shape: ModelShape, itemsize: int) -> int:
    """Bytes of weights as a pass computes with them, and of the output layer's gradient."""
    learner, models = settings.learner, len(_learners(settings))  # of which one has an output layer
    of_layers, of_root = 2 * itemsize * shape.layer_parameters, itemsize * shape.root_parameters
    if not learner.lora_rank:
        return (models + 1) * of_root + of_layers
    base = _base(learner, itemsize)
    is_as_kept = itemsize_of(base) == itemsize
    one = shape.width * shape.inner * (itemsize + 2)  # a matrix, and its values in 16 bits
    if _is_plain(learner):
        of_policy = (0 if is_as_kept else of_root) + (0 if is_as_kept and base != "nf4" else one)
        return of_policy + (models - 1) * (of_root + of_layers)
    if base == "nf4":
        of_layers = 2 * shape.layer_bytes(base) + one
    return models * of_root + of_layers


def _base(learner: LearnerSettings, itemsize: int) -> str:
    """Return the format in which weights are kept."""
    if not learner.lora_rank:
        return "float32"
    return base_dtype(learner.base_dtype, is_narrow=itemsize == 2)


def _is_plain(learner: LearnerSettings) -> bool:
    """Return whether one rank computes without FSDP2, which gathers copies."""
    return learner.ranks == 1 and not learner.compile and "parameters" not in learner.offload


def _loss(run: RunSettings, shape: ModelShape, itemsize: int, *, on_gpu: bool) -> int:
    """Bytes of a chunk of logits and, without the kernels of a card, of its float32 blocks."""
    of_logit = itemsize + (0 if on_gpu else 4 * BLOCKS_ALIVE)
    if run.head_dtype is not None and itemsize == 2:  # and a copy of its gradient in 16 bits
        of_logit += 4
    logits, least = CHUNK_SIZES["cuda" if on_gpu else "cpu"]
    return int(of_logit * max(logits, least * shape.vocabulary))


def _held(
    settings: Settings,
    shape: ModelShape,
    itemsize: int,
    tensor: int,
    memory: float,
    *,
    is_offloaded: bool,
) -> int:
    """Bytes of weights and gradients kept whole until an optimizer step's gradients are reduced."""
    models, trained = len(_learners(settings)) * shape.parameters, _trained(settings, shape)
    ranks = settings.learner.ranks // tensor
    if not reduces_once(
        models, trained=trained, ranks=ranks, memory=memory, is_offloaded=is_offloaded
    ):
        return 0
    gathered = shape.root_parameters + 2 * shape.layer_parameters  # counted in a step already
    whole = itemsize * (models - gathered)
    if _base(settings.learner, itemsize) == "nf4":
        packed = shape.layer_bytes("nf4")
        whole -= (shape.layers - 2) * (itemsize * shape.layer_parameters - packed)
    return whole + 4 * trained


def _reduction(settings: Settings, shape: ModelShape, shard: int, itemsize: int) -> int:
    """Bytes when the largest unit's gradients are reduced: its weights are still gathered.

    Several ranks have the gradients once as they are and once in float32. One rank without FSDP2
    has them as they are and adds them to those that it keeps. One rank with FSDP2 (for compiled
    layers or weights in host memory) also has float32 copies of its gradients, of the quotient and
    of the result.
    """
    rank, is_whole = settings.learner.lora_rank, settings.critic.kind == "model"
    parameters = shape.adapter_parameters(rank) if rank and not is_whole else shape.root_parameters
    if _is_plain(settings.learner) and not is_whole:
        return parameters * itemsize
    return parameters * (itemsize + (12 if shard == 1 else itemsize + 4))


def _copies(settings: Settings, shape: ModelShape, kind: str, itemsize: int) -> dict[str, int]:
    """Bytes of the layers' narrow weights that one rank without FSDP2 keeps with their activations.

    The weights of two layers are counted as gathered.
    """
    learner = settings.learner
    # A frozen matrix is widened for each product anew.
    if kind != "none" or itemsize == 4 or learner.lora_rank or not _is_plain(learner):
        return {}
    others = max(0, shape.layers - 2)
    return {"weights of the other layers in 16 bits": itemsize * others * shape.layer_parameters}


def _trained(settings: Settings, shape: ModelShape) -> int:
    """Return the number of parameters with gradients and moments."""
    if not settings.learner.lora_rank:
        return len(_learners(settings)) * shape.parameters
    adapters = shape.layers * shape.adapter_parameters(settings.learner.lora_rank)
    return adapters + (len(_learners(settings)) - 1) * shape.parameters


def _states(settings: Settings, shape: ModelShape, itemsize: int, *, shard: int) -> dict[str, int]:
    """Bytes of weights, gradients and moments for each of the ranks that share them."""
    models, base = len(_learners(settings)), _base(settings.learner, itemsize)
    share = 4 * -(-shape.parameters // shard)
    trained = 4 * -(-_trained(settings, shape) // shard)
    states = {"weights, float32": share * models}
    if base != "float32":
        frozen = -(-shape.kept_bytes(base) // shard)
        states = {f"frozen weights, {base}": frozen, "weights, float32": share * (models - 1)}
    if settings.learner.lora_rank:
        states["adapters"] = trained - share * (models - 1)
    is_own_reference = settings.learner.lora_rank and settings.algorithm.reference_model is None
    if settings.algorithm.kl_coefficient and not is_own_reference:
        states["weights of the reference"] = share
    states |= {"gradients": trained, "moments": 2 * trained}
    if settings.learner.optimizer == "muon":  # one moment for the matrices of layers
        in_layers = shape.parameters - shape.root_parameters
        states["moments"] -= 4 * -(-in_layers // shard) * models
    elif settings.learner.optimizer == "adamw8bit":  # codes, and a scale for each block of them
        states["moments"] = 2 * share * models // 4 * (BLOCK + 4) // BLOCK
    return states


def _place_states(
    settings: Settings, shape: ModelShape, itemsize: int, *, shard: int, on_gpu: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Divide weights, gradients and moments into those on the card and those in host memory."""
    card: dict[str, int] = {}
    host: dict[str, int] = {}
    alone = settings.model_copy(update={"critic": CriticSettings()})
    of_policy, of_all = (_states(one, shape, itemsize, shard=shard) for one in (alone, settings))
    of_critic = {name: size - of_policy[name] for name, size in of_all.items()}
    for states, learner in zip((of_policy, of_critic), _learners(settings), strict=False):
        place = host if on_gpu and "parameters" in learner.offload else card
        for name, size in states.items():
            place[name] = place.get(name, 0) + size
    return card, host


def saved_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of a checkpoint: the trained parameters and their moments."""
    return 4 * _trained(settings, shape) + _states(settings, shape, 4, shard=1)["moments"]


def smallest_card() -> int | None:
    """Bytes of this machine's smallest card; None if there is none."""
    sizes = [int(text) for text in query_gpus("memory.total") if text.isdigit()]
    return min(sizes) * 2**20 if sizes else None
