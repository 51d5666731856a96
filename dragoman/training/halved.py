"""A model that is trained in float32 and computes with weights rounded to bfloat16, which are made anew before every pass.

Under autocast alone each product rounds its weights by itself, each weight's gradient is widened by itself, and what runs between
the layers is float32. Here all weights are rounded at once, all gradients widened at once, and the layers hand on bfloat16; sums within
a norm, a product or the loss are float32 as before. The trained weights are the model's own: a checkpoint, an average or a validation
never meets the rounded ones, which are nothing but their function.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dragoman.config import TrainConfig
from dragoman.data.batches import Batch
from dragoman.models.blocks import Block
from dragoman.training.distributed import World
from dragoman.training.holding import Replicated, weights_of
from dragoman.training.loss import Loss, Trainable
from dragoman.training.precision import Precision


class Halved(Replicated):
    """Every rank holds the whole model, and a rounded copy that its passes go through."""

    adds = False

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model, world)
        self.rounded = copy.deepcopy(model).train()
        for parameter in self.rounded.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None
        self._exact: list[Tensor] = list(model.parameters())
        self._rounded: list[Tensor] = list(self.rounded.parameters())
        self._trained = [parameter for parameter in self.rounded.parameters() if parameter.requires_grad]

    def loss(self, task: Trainable, batch: Batch) -> Loss:
        """Round the weights as they are now, and compute a batch's loss with them."""
        with torch.no_grad():
            torch._foreach_copy_(self._rounded, self._exact)
        return task.loss(self.rounded, batch)

    def backward(self, loss: Loss) -> None:
        """Leave the loss's gradients on the trained weights, in the tensors that are there or in new ones."""
        try:
            loss.total.backward()  # type: ignore[no-untyped-call]
            self._widen()
        finally:
            for rounded in self._trained:
                rounded.grad = None

    @torch.no_grad()
    def _widen(self) -> None:
        places: list[Tensor] = []
        found: list[Tensor] = []
        for parameter, rounded in zip(self._parameters, self._trained, strict=True):
            if rounded.grad is None:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            else:
                parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                places.append(parameter.grad)
                found.append(rounded.grad)
        torch._foreach_copy_(places, found)


def choose_halving(config: TrainConfig, model: nn.Module, precision: Precision, device: torch.device) -> bool:
    """Follow `train.weights`; `auto` rounds on a GPU where every block allows it, and nothing does where a pass changes the model."""
    if precision.dtype != torch.bfloat16 or config.weights == "float32" or any(p.dtype != torch.float32 for p in model.parameters()):
        return False
    parameters = dict(model.named_parameters())
    if any(name not in parameters for name in weights_of(model)):  # running means: the copy's would be lost
        return False
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return config.weights == "bfloat16" or (device.type == "cuda" and bool(blocks) and all(block.halves for block in blocks))
