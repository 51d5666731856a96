"""Optimizers, and their state by parameter name.

Only torch's fused optimizers are used. They take the gradient's divisor and a "not finite" flag as
tensors (`grad_scale`, `found_inf`), so that scaling, clipping and skipping a step need neither
another pass over the gradients nor a synchronization with the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dragoman.config import TrainConfig
from dragoman.errors import CorruptError


def build_adam(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return Adam, Kingma and Ba (2015)."""
    return Adam(_parameter_groups(model, config), **_adam_arguments(config))


def build_adamw(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW, Loshchilov and Hutter (2019)."""
    return AdamW(_parameter_groups(model, config), **_adam_arguments(config))


class NesterovSGD(SGD):
    r"""Stochastic gradient descent with Nesterov momentum, in the form of Sutskever et al. (2013).

    .. math:: v \leftarrow \mu v + g, \quad w \leftarrow w - \eta (g + \mu v)

    Buffers start as zeros, which gives the same first step. Torch leaves them uninitialized until
    the first step writes them, also when `found_inf` skips that step.
    """

    def step(self, closure: Any = None) -> Any:
        """Do one step; parameters without a momentum buffer get one first."""
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None and not self.state.get(parameter):
                    self.state[parameter] = zero_state(self, parameter)
        return super().step(closure)


def build_sgd(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return SGD, with Nesterov momentum unless `train.momentum` is 0."""
    return NesterovSGD(
        _parameter_groups(model, config),
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        fused=True,
    )


def moment_slots(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors, of a parameter's shape, that are kept for each parameter."""
    if not isinstance(optimizer, SGD):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if optimizer.param_groups[0]["momentum"] else ()


def zero_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's state before the first step."""
    state = {slot: torch.zeros_like(parameter) for slot in moment_slots(optimizer)}
    if isinstance(optimizer, SGD):
        return state
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **state}


def state_dict(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name, `<parameter>.<slot>`."""
    return {
        f"{name}.{slot}": value.detach()
        for name, parameter in _trainable_parameters(model)
        for slot, value in sorted(optimizer.state.get(parameter, {}).items())
    }


def load_state_dict(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors that `state_dict` returned; every parameter must have its own."""
    owners = dict(_trainable_parameters(model))
    slots: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition(".")
        if name not in owners:
            raise CorruptError(
                "the optimizer state must belong to the model's parameters",
                found=key,
                fix="resume with the configuration of the run",
            )
        slots.setdefault(name, {})[slot] = value
    missing = [name for name in owners if name not in slots]
    if tensors and missing:
        raise CorruptError(
            "every parameter must have its optimizer state",
            found=f"none for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            fix="resume with the configuration of the run",
        )
    for name, parameter in owners.items():
        for slot, value in slots.get(name, {}).items():
            if slot != "step" and value.shape != parameter.shape:
                raise CorruptError(
                    f"{name}.{slot} must have the parameter's shape {tuple(parameter.shape)}",
                    found=str(tuple(value.shape)),
                    fix="resume with the configuration of the run",
                )
        optimizer.state[parameter] = {
            slot: value.to(device=parameter.device, copy=True)
            for slot, value in slots.get(name, {}).items()
        }


def _trainable_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield the trainable parameters; a shared one by its first name only."""
    return (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )


def _parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Return the parameter groups: weight decay applies to matrices, not to biases and norms."""
    matrices = [parameter for _, parameter in _trainable_parameters(model) if parameter.ndim > 1]
    vectors = [parameter for _, parameter in _trainable_parameters(model) if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the settings under torch's names."""
    return {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
        "fused": True,
    }
