from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dragoman.attention.absolute_position_encodings import LearnedPositions
from dragoman.attention.relative_position_encodings import ShawRelativeKeys
from dragoman.config import Config, TrainConfig
from dragoman.errors import CorruptError
from dragoman.layers.crf_and_token_softmax import LinearChainCRF
from dragoman.layers.multi_table_word_embedding import WordEmbedding
from dragoman.layers.rnn import GRU, SRU
from dragoman.layers.text_cnn import OneHotFilterBank
from dragoman.models.factory import build_model
from dragoman.training import optimizer as optimizers
from dragoman.training.optimizer_and_schedule_catalogue import OPTIMIZERS
from dragoman.training.train_step import apply_gradients


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    divisor: float = 1.0,
    bad: float = 0.0,
    rate: float = 0.01,
    seed: int = 1,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    apply_gradients(optimizer, lr=rate, divisor=torch.tensor(divisor), nonfinite=torch.tensor(bad))


def set_gradients(model: nn.Module, seed: int, *, divisor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) / divisor


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return torch's parameter groups: weight decay for matrices, none for vectors."""
    return [
        {"params": [each for each in model.parameters() if each.ndim > 1]}
        | {"weight_decay": weight_decay},
        {"params": [each for each in model.parameters() if each.ndim <= 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize(
    ("name", "plain"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_step_equals_torchs_with_divided_gradients(
    name: str, plain: type[torch.optim.Optimizer], weight_decay: float
) -> None:
    """Adam adds the weight decay to the gradient, AdamW does not."""
    ours, theirs = make_model(), make_model()
    config = TrainConfig(
        beta1=0.8, beta2=0.9, epsilon=1e-2, learning_rate=0.01, weight_decay=weight_decay
    )
    mine = OPTIMIZERS.load(name)(ours, config)
    reference = plain(
        decayed_groups(theirs, weight_decay),
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-2,
        foreach=False,
        fused=False,
    )  # type: ignore[call-arg]
    for seed in range(3):
        take_step(ours, mine, divisor=4.0, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for parameter in theirs.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) / 4
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_sgd_adds_weight_decay_to_the_gradients_of_matrices() -> None:
    ours, theirs = make_model(), make_model()
    config = TrainConfig(momentum=0.9, optimizer="sgd", weight_decay=0.5)
    mine = OPTIMIZERS.load("sgd")(ours, config)
    reference = torch.optim.SGD(
        decayed_groups(theirs, 0.5), lr=0.01, momentum=0.9, nesterov=True, foreach=False
    )
    for seed in range(3):
        take_step(ours, mine, divisor=4.0, seed=seed)
        set_gradients(theirs, seed, divisor=4.0)
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("momentum", [0.0, 0.99])
def test_sgd_equals_torchs_and_the_papers_nesterov_momentum(momentum: float) -> None:
    """Torch's loop without fusion; and v = mu v + g, w = w - lr (g + mu v) written out."""
    ours, theirs, written = make_model(), make_model(), make_model()
    config = TrainConfig(momentum=momentum, optimizer="sgd")
    mine = OPTIMIZERS.load("sgd")(ours, config)
    reference = torch.optim.SGD(
        theirs.parameters(), lr=0.01, momentum=momentum, nesterov=momentum > 0, foreach=False
    )
    speeds = [torch.zeros_like(parameter) for parameter in written.parameters()]
    for seed in range(4):
        take_step(ours, mine, divisor=4.0, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for parameter in theirs.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) / 4
        reference.step()
        for parameter, speed, other in zip(
            written.parameters(), speeds, theirs.parameters(), strict=True
        ):
            speed.mul_(momentum).add_(other.grad)
            parameter.data -= 0.01 * (other.grad + momentum * speed)
    for one, two, three in zip(*(m.parameters() for m in (ours, theirs, written)), strict=True):
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(one, three)


@pytest.mark.parametrize("rate", [0.05, 0.6])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_adafactor_equals_torchs(rate: float, size: float) -> None:
    """Also where the step's inverse square root is below the rate, and with tiny weights."""
    ours, theirs = make_model(), make_model()
    with torch.no_grad():
        for parameter in (*ours.parameters(), *theirs.parameters()):
            parameter.mul_(size)
    mine = OPTIMIZERS.load("adafactor")(ours, TrainConfig(optimizer="adafactor"))
    reference = torch.optim.Adafactor(theirs.parameters(), lr=rate, foreach=False)
    for seed in range(6):
        take_step(ours, mine, divisor=4.0, rate=rate, seed=seed)
        set_gradients(theirs, seed, divisor=4.0)
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_muon_equals_torchs_on_matrices_and_adamw_elsewhere() -> None:
    """Matrices of two shapes, one of them tall; torch computes one at a time."""
    ours, theirs = make_model(), make_model()
    config = TrainConfig(optimizer="muon", momentum=0.8, weight_decay=0.1, beta1=0.8, beta2=0.9)
    mine = OPTIMIZERS.load("muon")(ours, config)
    matrices = [each for each in theirs.parameters() if each.ndim == 2]
    vectors = [each for each in theirs.parameters() if each.ndim == 1]
    references = [
        torch.optim.Muon(
            matrices, lr=0.01, momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(vectors, lr=0.01, betas=(0.8, 0.9), eps=config.epsilon, weight_decay=0.0),
    ]
    # Torch's momentum is an average, so its sum is scaled; the update is not: it is orthogonalized.
    for seed in range(4):
        take_step(ours, mine, divisor=4.0, seed=seed)
        set_gradients(theirs, seed, divisor=4.0)
        for reference in references:
            reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-4)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in ((3, 8, 8), (2, 5, 40), (2, 40, 5)):
        matrices = torch.randn(shape, generator=generator)
        found = optimizers.orthogonalize(matrices).float()
        assert found.shape == matrices.shape
        values = torch.linalg.svdvals(found)
        if shape[1] != shape[2]:  # a random square matrix has singular values near zero
            assert values.min() > 0.6
        assert values.max() < 1.3
        # The singular vectors stay: the product with the matrix is symmetric and positive.
        product = found @ matrices.mT
        torch.testing.assert_close(product, product.mT, rtol=0.05, atol=0.15)


def test_muon_leaves_embeddings_and_the_output_to_adamw() -> None:
    config = Config().replace(
        model={
            "encoder": ["transformer"],
            "decoder": ["transformer"],
            "width": 16,
            "heads": 2,
            "tie_embeddings": "none",
        }
    )
    model = build_model(config.model, src_vocab_size=20, tgt_vocab_size=24)
    optimizer = OPTIMIZERS.load("muon")(model, TrainConfig(optimizer="muon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, *others = optimizer.param_groups
    assert muon["muon"]
    assert not any(group["muon"] for group in others)
    for parameter in muon["params"]:
        assert parameter.ndim == 2
        assert 20 not in parameter.shape
        assert 24 not in parameter.shape
    assert any("query_key_value" in names[id(parameter)] for parameter in muon["params"])
    listed = [each for group in optimizer.param_groups for each in group["params"]]
    assert len(listed) == len({id(each) for each in listed}) == len(names)


def test_muon_leaves_matrices_of_one_row_or_column_to_adamw() -> None:
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 2)])
    optimizer = OPTIMIZERS.load("muon")(model, TrainConfig(optimizer="muon"))
    muon, *others = optimizer.param_groups
    assert [tuple(parameter.shape) for parameter in muon["params"]] == [(2, 4)]
    assert sum(len(group["params"]) for group in others) == 5


def test_muon_leaves_tables_that_are_looked_up_to_adamw() -> None:
    """Most rows of a table have no gradient, and orthogonalizing would change the others alike."""
    tables = {
        "positions": LearnedPositions(width=4, max_positions=6),
        "distances": ShawRelativeKeys(4, max_distance=2),
        "words": WordEmbedding(9, 4, widths=[4]),
        "filters": OneHotFilterBank(9, widths=[2], filters=3),
        "tags": LinearChainCRF(3),
    }
    matrices = {"gru": GRU(4, 4), "sru": SRU(4, 4), "linear": nn.Linear(4, 4)}
    model = nn.ModuleDict({**tables, **matrices})
    optimizer = OPTIMIZERS.load("muon")(model, TrainConfig(optimizer="muon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(names[id(each)] for each in optimizer.param_groups[0]["params"]) == [
        "gru.module.weight_hh_l0",
        "gru.module.weight_ih_l0",
        "linear.weight",
        "sru.weight_l0",
    ]


def test_optimizers_of_whole_matrices_are_not_sharded() -> None:
    for name in ("muon", "adafactor"):
        (problem,) = TrainConfig(optimizer=name, fsdp="on").problems()
        assert f"train.optimizer={name} needs whole matrices; found train.fsdp=on" in problem


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_first_step_that_is_not_finite_leaves_no_trace(name: str) -> None:
    """Torch leaves the momentum of a skipped first step uninitialized."""
    model, other = make_model(), make_model()
    optimizer, untouched = (OPTIMIZERS.load(name)(each, TrainConfig()) for each in (model, other))
    take_step(model, optimizer, bad=1.0, divisor=float("nan"))
    for seed in (2, 3):
        take_step(model, optimizer, seed=seed)
        take_step(other, untouched, seed=seed)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_zero_state_has_the_slots_of_a_real_one(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS.load(name)(model, TrainConfig())
    take_step(model, optimizer)
    for parameter in model.parameters():
        real, zero = optimizer.state[parameter], optimizers.zero_state(optimizer, parameter)
        assert {slot: (value.shape, value.dtype) for slot, value in real.items()} == {
            slot: (value.shape, value.dtype) for slot, value in zero.items()
        }
        assert not any(value.any() for value in zero.values())
    shapes = optimizers.full_state_shapes(optimizer, model)
    assert shapes == {
        key: tuple(value.shape) for key, value in optimizers.state_dict(optimizer, model).items()
    }


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_step_that_is_not_finite_changes_nothing_at_all(name: str) -> None:
    """Weights, moments and step counts do not change (facebookresearch/fairseq#1529)."""
    model = make_model()
    optimizer = OPTIMIZERS.load(name)(model, TrainConfig(weight_decay=0.1))
    take_step(model, optimizer)
    weights = copy.deepcopy(model.state_dict())
    moments = {key: value.clone() for key, value in optimizers.state_dict(optimizer, model).items()}
    take_step(model, optimizer, bad=1.0, divisor=float("nan"), seed=5)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(
        torch.equal(value, moments[key])
        for key, value in optimizers.state_dict(optimizer, model).items()
    )


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_weight_decay_is_times_the_learning_rate_and_of_matrices_only(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS.load(name)(model, TrainConfig(optimizer=name, weight_decay=0.5))
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, lr=0.1, divisor=torch.tensor(1.0), nonfinite=torch.tensor(0.0))
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.data, before[key] * (0.95 if parameter.ndim > 1 else 1.0)
        )


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_state_is_saved_and_loaded_by_parameter_name(name: str) -> None:
    model, other = make_model(0), make_model(0)
    optimizer, again = (OPTIMIZERS.load(name)(each, TrainConfig()) for each in (model, other))
    for seed in range(3):
        take_step(model, optimizer, seed=seed)
    other.load_state_dict(model.state_dict())
    tensors = {key: value.clone() for key, value in optimizers.state_dict(optimizer, model).items()}
    owners = dict(model.named_parameters())
    assert tensors.keys() == {
        f"{owner}.{slot}"
        for owner, parameter in owners.items()
        for slot in optimizers.zero_state(optimizer, parameter)
    }
    assert name == "sgd" or "1.weight.step" in tensors
    optimizers.load_state_dict(again, other, dict(reversed(tensors.items())))
    for seed in range(3, 6):
        take_step(model, optimizer, seed=seed)
        take_step(other, again, seed=seed)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_loaded_state_is_a_copy() -> None:
    """A "copy" that aliases memory changes after it was taken (pytorch/pytorch#144657)."""
    model = make_model()
    optimizer = OPTIMIZERS.load("adam")(model, TrainConfig())
    take_step(model, optimizer)
    tensors = {key: value.clone() for key, value in optimizers.state_dict(optimizer, model).items()}
    optimizers.load_state_dict(optimizer, model, tensors)
    kept = tensors["0.weight.exp_avg"].clone()
    take_step(model, optimizer)
    assert torch.equal(tensors["0.weight.exp_avg"], kept)


def test_a_state_that_does_not_fit_is_rejected_by_name() -> None:
    model = make_model()
    optimizer = OPTIMIZERS.load("adam")(model, TrainConfig())
    take_step(model, optimizer)
    tensors = optimizers.state_dict(optimizer, model)
    with pytest.raises(CorruptError, match=r"found 9\.weight\.exp_avg"):
        optimizers.load_state_dict(
            optimizer, model, {**tensors, "9.weight.exp_avg": torch.zeros(1)}
        )
    with pytest.raises(CorruptError, match=r"found none for 0\.weight;"):
        optimizers.load_state_dict(
            optimizer,
            model,
            {key: value for key, value in tensors.items() if not key.startswith("0.weight")},
        )
    with pytest.raises(CorruptError, match=r"found none for 0\.weight and 1 more"):
        optimizers.load_state_dict(
            optimizer,
            model,
            {key: value for key, value in tensors.items() if not key.startswith("0.")},
        )
    with pytest.raises(
        CorruptError,
        match=r"0\.weight\.exp_avg must have the shape \(3, 4\); found \(2, 2\)",
    ):
        optimizers.load_state_dict(
            optimizer, model, {**tensors, "0.weight.exp_avg": torch.zeros(2, 2)}
        )


def test_frozen_parameters_have_no_state() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    optimizer = OPTIMIZERS.load("adam")(model, TrainConfig())
    take_step(model, optimizer)
    assert not any(key.startswith("0.weight") for key in optimizers.state_dict(optimizer, model))
