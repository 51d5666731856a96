"""Optimizers, and their state by parameter name.

Only torch's fused optimizers are used. They take the gradient's divisor and a "not finite" flag as
tensors (`grad_scale`, `found_inf`), so that scaling, clipping and skipping a step need neither
another pass over the gradients nor a synchronization with the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from dragoman.config import TrainConfig
from dragoman.errors import CorruptError


def build_adam(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return Adam, Kingma and Ba (2015)."""
    return Adam(_parameter_groups(model, config), **_adam_arguments(config))


def build_adamw(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW, Loshchilov and Hutter (2019)."""
    return AdamW(_parameter_groups(model, config), **_adam_arguments(config))


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
