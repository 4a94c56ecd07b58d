"""Logits of tokens, a chunk at a time: log-probs, entropies and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from configs.architecture import LogitChange

from .compilers import has_kernels
from .memory_rules import CHUNK_SIZES

# --------------------------------------------------------------------------------------------------
# The way from the output layer's logits to the distribution that a token was drawn from.


@dataclass(frozen=True, slots=True)
class Softmax:
    """Changes of logits before a softmax, and the dtype that they are computed in."""

    change: LogitChange
    """The model's own change of its logits, which comes first."""
    temperature: float
    """Divides the logits."""
    dtype: torch.dtype | None = None
    """Data type of the layer's products and sums; None = that of its weight."""

    def prepare(self, logits: Tensor) -> Tensor:
        """Change logits of any shape, in place."""
        if self.change.factor != 1.0:
            logits.mul_(self.change.factor)
        if self.change.cap is not None:
            logits.div_(self.change.cap).tanh_().mul_(self.change.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, prepared: Tensor) -> Tensor | float:
        """Differentiate `prepare`, given its result."""
        slope = self.change.factor / self.temperature
        if self.change.cap is None:
            return slope
        tanh = prepared * (self.temperature / self.change.cap)
        return tanh.square_().neg_().add_(1).mul_(slope)

    def factors(self) -> dict[str, float | None]:
        """Return `prepare` as factors within the hyperbolic tangent and of it; None = no cap."""
        factor, cap = self.change.factor, self.change.cap
        if cap is None:
            return {"inner": factor / self.temperature, "outer": None}
        return {"inner": factor / cap, "outer": cap / self.temperature}


# --------------------------------------------------------------------------------------------------
# A part of the vocabulary on each of several ranks: none of them has all logits of a token.
#
# Each computes maximum, sums and the chosen logit over its part; from those of all parts every rank
# gets the same log-probs and entropies. Gradients of the weight stay where they are, those of the
# hidden states are added up.
#
# Shapes: C tokens of a chunk.


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Consecutive tokens of the vocabulary, whose logits this rank computes."""

    first: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks that have the other parts; None = there are none."""

    def places(self, targets_C: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Find tokens in this rank's part, and whether they are there; None = all of them are."""
        if self.group is None:
            return targets_C, None
        places_C = targets_C - self.first
        is_here_C = (places_C >= 0) & (places_C < size)
        return torch.where(is_here_C, places_C, 0), is_here_C

    def merge(self, measures_4C: Tensor, is_here_C: Tensor | None) -> Tensor:
        """Merge the parts of all ranks. Collective, as all below.

        Args:
            measures_4C: Largest logit; from it, the chosen logit, the sum of the powers, and the
                sum of their products with the logits. Shape [4, C].
            is_here_C: Whether the chosen token is in this rank's part. Shape [C].

        Returns:
            The same numbers of the whole vocabulary. Shape [4, C].
        """
        if self.group is None:
            return measures_4C
        assert is_here_C is not None
        local_tops_C, chosen_C, sums_C, products_C = measures_4C
        tops_C = local_tops_C.clone()
        dist.all_reduce(tops_C, op=dist.ReduceOp.MAX, group=self.group)
        lower_C = local_tops_C - tops_C
        factors_C = lower_C.exp()
        chosen_C = torch.where(is_here_C, chosen_C + lower_C, 0)
        products_C = factors_C * (products_C + sums_C * lower_C)
        sums_3C = torch.stack([chosen_C, factors_C * sums_C, products_C])
        dist.all_reduce(sums_3C, group=self.group)
        return torch.cat([tops_C[None], sums_3C])

    def before(self, shares_C: Tensor) -> Tensor:
        """Add up the shares of all earlier parts, given this one's. Shape [C]."""
        if self.group is None:
            return torch.zeros_like(shares_C)
        rank = dist.get_rank(self.group)
        shares_PC = shares_C.new_zeros(dist.get_world_size(self.group), len(shares_C))
        shares_PC[rank] = shares_C
        dist.all_reduce(shares_PC, group=self.group)
        return shares_PC[:rank].sum(0)

    def count(self, tokens_C: Tensor, size: int) -> Tensor:
        """Add up numbers of tokens of all parts, of which this has `size`; the last one at most."""
        last = torch.full_like(tokens_C[:1], size)
        counts = torch.cat([tokens_C, last])
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return torch.minimum(counts[:-1], counts[-1] - 1)  # shares add up to 1, nearly

    def add(self, of_states_ND: Tensor) -> None:
        """Add up the ranks' gradients of the hidden states, in place."""
        if self.group is not None:
            dist.all_reduce(of_states_ND, group=self.group)


ALL_OF_IT = VocabularyPart()


# --------------------------------------------------------------------------------------------------
# The logits of a chunk of tokens, in one buffer that the next chunk overwrites.
#
# So an [N, V] tensor never exists. On a card kernels read the logits once for the scores and once
# for the gradient (`logit_kernels.py`). Elsewhere all between the products goes block by block, a
# few tokens at a time, so that it stays in a core's caches.
#
# Shapes: N scored tokens (flat), C tokens of a chunk, R of a block, D model width, V vocabulary,
# S blocks of scratch memory.

BLOCKS_PER_CHUNK = 16  # fewer, and their temporaries outweigh the chunk


@cache
def kernels_for(device_type: str) -> Any | None:
    """Import the module of kernels; None where torch's operators are used."""
    is_built = has_kernels(device_type)
    return import_module(".logit_kernels", __package__) if is_built else None


class Inputs(NamedTuple):
    """Tensors from which logits are computed."""

    states_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    part: VocabularyPart = ALL_OF_IT
    """The part of the vocabulary that V counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Numbers of each token of a chunk, from all of its logits. Shapes [C]."""

    log_sums_C: Tensor
    """Log of the sum of the logits' powers."""
    logprobs_C: Tensor
    entropies_C: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossDerivatives:
    """Derivatives of a loss. Shapes [C]."""

    logprobs_C: Tensor
    entropies_C: Tensor | None
    """None = the loss does not depend on entropies."""


class LogitChunk:
    """Logits of consecutive tokens, which their gradient replaces."""

    def __init__(
        self,
        rows: slice,
        logits_CV: Tensor,
        targets_C: Tensor,
        *,
        softmax: Softmax,
        scratch: Callable[[], Tensor],
        part: VocabularyPart,
    ) -> None:
        self.rows = rows
        """Tokens of the chunk, among all N."""
        self.logits_CV = logits_CV
        self._places_C, self._is_here_C = part.places(targets_C, logits_CV.shape[1])
        self._part = part
        self._softmax = softmax
        self._scratch = scratch
        self._wide = torch.promote_types(logits_CV.dtype, torch.float32)
        """bfloat16, in which the layer computes, has too few digits for a log-prob."""
        is_double = self._wide == torch.float64
        self._kernels = None if is_double else kernels_for(logits_CV.device.type)
        self._is_prepared = False

    def statistics(self) -> Statistics:
        """Compute log-probs and entropies. Collective where ranks have parts of the vocabulary."""
        measures_4C = self._measure()
        tops_C, chosen_C, sums_C, products_C = self._part.merge(measures_4C, self._is_here_C)
        logs_C = sums_C.log()
        return Statistics(tops_C + logs_C, chosen_C - logs_C, logs_C - products_C / sums_C)

    def _measure(self) -> Tensor:
        """Compute the numbers of `VocabularyPart.merge` over this rank's part. Shape [4, C]."""
        if self._kernels is not None:
            factors = self._softmax.factors()
            measured: Tensor = self._kernels.measure(self.logits_CV, self._places_C, **factors)
            return measured
        measures_4C = self.logits_CV.new_empty(4, len(self.logits_CV), dtype=self._wide)
        scratch_SRV = self._scratch()
        for rows, logits_RV in self._blocks():
            tops_R = logits_RV.amax(-1)
            shifted_RV, powers_RV = scratch_SRV[:2, : len(tops_R)]
            torch.sub(logits_RV, tops_R[:, None], out=shifted_RV)
            measures_4C[0, rows] = tops_R
            measures_4C[1, rows] = shifted_RV.gather(1, self._places_C[rows, None])[:, 0]
            torch.exp(shifted_RV, out=powers_RV)
            measures_4C[2, rows] = powers_RV.sum(-1)
            measures_4C[3, rows] = powers_RV.mul_(shifted_RV).sum(-1)
        return measures_4C

    def draw(self, numbers_C: Tensor) -> Tensor:
        """Draw a token from each distribution, by numbers between 0 and 1. Shape [C], int64.

        Collective where `statistics` is.
        """
        log_sums_C = self.statistics().log_sums_C
        shares_C = torch.empty_like(log_sums_C)
        for rows, logits_RV in self._blocks():
            shares_C[rows] = (logits_RV - log_sums_C[rows, None]).exp_().sum(-1)
        before_C = self._part.before(shares_C)
        drawn_C = torch.empty_like(self._places_C)
        for rows, logits_RV in self._blocks():
            shares_RV = (logits_RV - log_sums_C[rows, None]).exp_().cumsum_(-1)
            left_R1 = (numbers_C[rows] - before_C[rows])[:, None]
            drawn_C[rows] = (shares_RV < left_R1).sum(-1)
        return self._part.count(drawn_C, self.logits_CV.shape[1])

    def differentiate(
        self, log_sums_C: Tensor, entropies_C: Tensor, slopes: LossDerivatives
    ) -> None:
        """Put the gradient of a loss in the place of the logits.

        Args:
            log_sums_C: Logs of the sums of these logits' powers. Shape [C].
            entropies_C: Entropies of these logits. Shape [C].
            slopes: Derivatives of the loss.
        """
        if self._kernels is not None:
            places_C = self._places_C
            if self._is_here_C is not None:
                places_C = torch.where(self._is_here_C, places_C, -1)
            scores = places_C, log_sums_C, entropies_C
            factors = self._softmax.factors()
            self._kernels.differentiate(
                self.logits_CV, *scores, slopes.logprobs_C, slopes.entropies_C, **factors
            )
            return
        scratch_SRV = self._scratch()
        for rows, logits_RV in self._blocks():
            slope = self._softmax.slope(logits_RV)
            slopes_R1 = slopes.logprobs_C[rows, None]
            log_pi_RV = logits_RV.sub_(log_sums_C[rows, None])
            gradient_RV = scratch_SRV[0, : len(log_pi_RV)]
            torch.exp(log_pi_RV, out=gradient_RV)
            if slopes.entropies_C is None:
                gradient_RV.mul_(-slopes_R1)
            else:  # of the entropy H: -pi (log pi + H)
                log_pi_RV.add_(entropies_C[rows, None]).mul_(slopes.entropies_C[rows, None])
                gradient_RV.mul_(log_pi_RV.add_(slopes_R1).neg_())
            if self._is_here_C is not None:
                slopes_R1 = slopes_R1 * self._is_here_C[rows, None]
            gradient_RV.scatter_add_(1, self._places_C[rows, None], slopes_R1)
            self.logits_CV[rows].copy_(gradient_RV.mul_(slope))

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits of each block, wide, and ready for the softmax."""
        first = 0
        for narrow_RV in self.logits_CV.split(-(-len(self.logits_CV) // BLOCKS_PER_CHUNK)):
            logits_RV = narrow_RV
            if narrow_RV.dtype != self._wide:
                logits_RV = self._scratch()[2, : len(narrow_RV)].copy_(narrow_RV)
            if not self._is_prepared:
                self._softmax.prepare(logits_RV)
            yield slice(first, first + len(logits_RV)), logits_RV
            first += len(logits_RV)
        # Logits that are not copied to scratch memory have been changed in place.
        self._is_prepared = self.logits_CV.dtype == self._wide


class Gradients:
    """Gradients of what logits are computed from, added up chunk by chunk."""

    def __init__(self, inputs: Inputs, needed: tuple[bool, ...]) -> None:
        self._inputs = inputs
        self.of_inputs = tuple(
            torch.zeros_like(tensor) if tensor is not None and is_needed else None
            for tensor, is_needed in zip(inputs[:3], needed, strict=False)
        )
        """Gradients of states, weight and bias; None where they are not needed."""

    def add(self, chunk: LogitChunk) -> None:
        """Add the gradients of a chunk whose logits have been replaced by their gradient."""
        states_ND, weight_VD, *_ = self._inputs
        gradient_CV = chunk.logits_CV.to(weight_VD.dtype)
        of_states_ND, of_weight_VD, of_bias_V = self.of_inputs
        if of_states_ND is not None:
            torch.mm(gradient_CV, weight_VD, out=of_states_ND[chunk.rows])
        if of_weight_VD is not None:
            of_weight_VD.addmm_(gradient_CV.T, states_ND[chunk.rows])
        if of_bias_V is not None:
            of_bias_V.add_(gradient_CV.sum(0))

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of states, weight and bias once all chunks are added.

        None for those that are not needed. Collective where ranks have parts of the vocabulary.
        """
        if self.of_inputs[0] is not None:
            self._inputs.part.add(self.of_inputs[0])
        return self.of_inputs


def chunks(inputs: Inputs, targets_N: Tensor, softmax: Softmax) -> Iterator[LogitChunk]:
    """Compute the logits of one chunk after the other, each in the place of the one before."""
    states_ND, weight_VD, bias_V, part = inputs
    least = CHUNK_SIZES[states_ND.device.type]
    size = max(1, min(len(states_ND), max(least.tokens, least.logits // len(weight_VD))))
    dtype = softmax.dtype or weight_VD.dtype
    buffer_CV = weight_VD.new_empty(size, len(weight_VD), dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    shape = 2 + (wide != dtype), -(-size // BLOCKS_PER_CHUNK), len(weight_VD)

    @cache
    def scratch() -> Tensor:
        """Allocate once for all blocks: on a CPU, new memory takes longer than what fills it."""
        return weight_VD.new_empty(shape, dtype=wide)

    for start in range(0, len(states_ND), size):
        rows = slice(start, min(start + size, len(states_ND)))
        logits_CV = buffer_CV[: rows.stop - start]
        _multiply(states_ND[rows], weight_VD.T, logits_CV)
        if bias_V is not None:
            logits_CV.add_(bias_V)
        yield LogitChunk(
            rows, logits_CV, targets_N[rows], softmax=softmax, scratch=scratch, part=part
        )


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Multiply matrices; the products are added up and kept in the dtype of `out`."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:  # reads 16 bits, adds up in 32
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
