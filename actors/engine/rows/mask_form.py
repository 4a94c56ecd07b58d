"""Attention masks in the form that a model takes: per type of layer, and added or boolean.

Shapes: R rows in use, T new tokens, S' slots that may be looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

LOWEST = torch.finfo(torch.bfloat16).min
"""Added to an attention's logit, leaves nothing of it; finite in every data type of a model."""


class MaskForm:
    """The form in which the attention of a model takes its mask; given one, it adds nothing."""

    def __init__(self, config: PreTrainedConfig, *, added: bool) -> None:
        """Prepare.

        Args:
            config: Of the model.
            added: Its attention adds the mask to its logits, as the eager one does.
        """
        self._added = added
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())

    def of(self, mask: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mask of the model, or of each type of its layers.

        Args:
            mask: True where a query may look at a slot. Shape [R, 1, T, S'], bool.
            positions: Of the queries. Shape [R, T].
        """
        if self._window is None:
            return self._form(mask)
        slots = torch.arange(mask.shape[-1], device=mask.device)
        near = mask & (slots > positions[:, None, :, None] - self._window)
        if not self._layer_types:
            return self._form(near)
        masks = {"full_attention": mask, "sliding_attention": near}
        return {name: self._form(masks[name]) for name in self._layer_types}

    def _form(self, mask: Tensor) -> Tensor:
        if not self._added:
            return mask
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, LOWEST)
