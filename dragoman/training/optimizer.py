"""Optimizers, and their state by parameter name.

Like torch's fused optimizers, all take the gradient's divisor and a "not finite" flag as tensors
(`grad_scale`, `found_inf`), so that scaling, clipping and skipping a step need no synchronization
with the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dragoman.config import TrainConfig
from dragoman.errors import CorruptError
from dragoman.layers.convs2s import PlainWeight, WeightNormWeight
from dragoman.layers.rnn import SRU

# Newton-Schulz iteration of Muon: coefficients and number of steps of Jordan et al. (2024).
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
NEWTON_SCHULZ_STEPS = 5
RNN_VECTORS = ("bias", "recurrent")  # of SRU: two vectors each, not a matrix


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


class Muon(AdamW):
    r"""Muon for the matrices of the layers, AdamW for embeddings, norms, biases and the output.

    Tables of positions, word vectors, inducing points and the like are embeddings in this sense.

    .. math:: m \leftarrow \mu m + g, \quad
        w \leftarrow (1 - \eta\lambda) w - 0.2\,\eta\sqrt{\max(r, c)}\; \mathrm{NS}(g + \mu m)

    NS replaces all singular values of an r x c matrix by values near one. Jordan et al. (2024),
    "Muon: An optimizer for hidden layers in neural networks", with the scale of Liu et al. (2025),
    "Muon is Scalable for LLM Training", which gives the updates the size of AdamW's, so that one
    learning rate serves both. Matrices of one shape are computed together.
    """

    def step(self, closure: Any = None) -> Any:
        """Do one step of both."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            result = super().step(closure) if self.param_groups else None
        finally:
            self.param_groups = groups
        divisor, skip = _divisor_and_skip(self)
        for group in groups:
            if not group["muon"]:
                continue
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._step_matrices(parameters, group, divisor, skip)
        return result

    @torch.no_grad()
    def _step_matrices(
        self, parameters: Sequence[Tensor], group: Mapping[str, Any], divisor: Tensor, skip: Tensor
    ) -> None:
        """Update matrices of one shape."""
        for parameter in parameters:
            if not self.state.get(parameter):
                self.state[parameter] = zero_state(self, parameter)
        gradients = torch.stack([parameter.grad for parameter in parameters]) / divisor  # type: ignore[misc] # tensors
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum = torch.stack(buffers) * group["momentum"] + gradients
        update = orthogonalize(gradients + group["momentum"] * momentum)
        scale = group["lr"] * 0.2 * max(parameters[0].shape) ** 0.5
        keep = 1 - group["lr"] * group["weight_decay"]
        for number, parameter in enumerate(parameters):
            buffer = buffers[number]
            buffer.copy_(torch.where(skip, buffer, momentum[number]))
            new = parameter * keep - scale * update[number].to(parameter.dtype)
            parameter.copy_(torch.where(skip, parameter, new))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices (N, r, c) with singular values near one, by Newton-Schulz iteration.

    In bfloat16, as in the released code: the values end between about 0.7 and 1.2 anyway.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if is_tall else matrices).to(torch.bfloat16)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


def build_muon(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return Muon, with AdamW for what is not the matrix of a linear layer or a recurrence."""
    chosen = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.RNNBase | SRU | PlainWeight | WeightNormWeight)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 2 and min(parameter.shape) > 1 and not name.startswith(RNN_VECTORS)
    }
    matrices = [each for _, each in _trainable_parameters(model) if id(each) in chosen]
    muon = {
        "params": matrices,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "muon": True,
    }
    groups = [muon] if matrices else []
    for group in _parameter_groups(model, config):
        others = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        if others:
            groups.append({**group, "params": others, "momentum": 0.0, "muon": False})
    return Muon(groups, **_adam_arguments(config))


class Adafactor(Optimizer):
    r"""Adafactor: second moments of a matrix as the product of a row and a column.

    .. math:: \hat v = r c / \mathrm{mean}(r), \quad u = g / \sqrt{\hat v}, \quad
        w \leftarrow w - \eta\,\max(10^{-3}, \mathrm{RMS}(w))\; u / \max(1, \mathrm{RMS}(u))

    Shazeer and Stern (2018), without momentum: the learning rate is relative to the size of the
    weights and at most the inverse square root of the step; the averages' decay is 1 - t^-0.8.
    """

    def __init__(self, params: Iterable[Any], *, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one step."""
        divisor, skip = _divisor_and_skip(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state.get(parameter):
                    self.state[parameter] = zero_state(self, parameter)
                self._step_parameter(parameter, parameter.grad / divisor, group, skip)

    def _step_parameter(
        self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], skip: Tensor
    ) -> None:
        """Update one parameter."""
        state = self.state[parameter]
        epsilon = torch.finfo(gradient.dtype).eps
        step = state["step"] + 1
        new_state, decay = {"step": step}, step**-0.8  # one minus the averages' decay
        if gradient.ndim > 1:
            row = torch.lerp(state["row"], gradient.square().mean(dim=-1, keepdim=True), decay)
            column = torch.lerp(
                state["column"], gradient.square().mean(dim=-2, keepdim=True), decay
            )
            variance = row @ column / row.mean(dim=-2, keepdim=True).clamp(min=epsilon)
            new_state |= {"row": row, "column": column}
        else:
            variance = torch.lerp(state["variance"], gradient.square(), decay)
            new_state["variance"] = variance
        update = gradient * variance.clamp(min=epsilon**2).rsqrt()
        update = update / _root_mean_square(update).clamp(min=1.0)
        rate = torch.clamp(step.rsqrt(), max=group["lr"])
        rate = rate * _root_mean_square(parameter).clamp(min=1e-3)
        new = parameter * (1 - group["lr"] * group["weight_decay"]) - rate * update
        for slot, value in new_state.items():
            state[slot].copy_(torch.where(skip, state[slot], value))
        parameter.copy_(torch.where(skip, parameter, new))


def build_adafactor(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return Adafactor, Shazeer and Stern (2018)."""
    return Adafactor(_parameter_groups(model, config), lr=config.learning_rate)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _divisor_and_skip(optimizer: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients' divisor, and whether to skip the step, as tensors."""
    return optimizer.grad_scale, optimizer.found_inf > 0


def state_shapes(optimizer: Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that is kept for a parameter, by slot."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": shape} if optimizer.param_groups[0]["momentum"] else {}
    if isinstance(optimizer, Adafactor):
        if len(shape) < 2:
            return {"step": (), "variance": shape}
        return {"step": (), "row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1])}
    if isinstance(optimizer, Muon) and any(
        parameter is each
        for group in optimizer.param_groups
        if group["muon"]
        for each in group["params"]
    ):
        return {"momentum_buffer": shape}
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


def zero_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's state before the first step."""
    return {
        slot: torch.zeros_like(parameter)
        if shape == tuple(parameter.shape) and slot != "step"
        else torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        for slot, shape in state_shapes(optimizer, parameter).items()
    }


def full_state_shapes(optimizer: Optimizer, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of `state_dict` after the first step."""
    return {
        f"{name}.{slot}": shape
        for name, parameter in _trainable_parameters(model)
        for slot, shape in state_shapes(optimizer, parameter).items()
    }


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
        shapes = state_shapes(optimizer, parameter)
        for slot, value in slots.get(name, {}).items():
            if tuple(value.shape) != shapes.get(slot):
                raise CorruptError(
                    f"{name}.{slot} must have the shape {shapes.get(slot, 'of another optimizer')}",
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
