"""FSDP: same losses, checkpoints for any number of ranks, and no rank that waits forever."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from fault_processes import last_step, wait_for_step
from safetensors.torch import load_file
from test_ranks import run_ranks, start_ranks, steps_of
from training_kit import log_of, tensors_of

from dragoman.checkpoint.run_directory import RunDirectory


def files_of(directory: Path, step: int) -> set[str]:
    return {path.name for path in (directory / f"step-{step:08d}").iterdir()}


def validations_of(directory: Path) -> list[dict]:
    return [record for record in log_of(directory) if record.get("event") == "validation"]


def output_of(directory: Path) -> str:
    return directory.with_name("output").read_text()


@pytest.fixture(scope="module")
def written(fork_server, tmp_path_factory):
    """Runs of 1, 2 and 4 ranks; each has a step 4 and a step 8."""
    folder = tmp_path_factory.mktemp("shards")
    for ranks in (1, 2, 4):
        directory = folder / str(ranks) / "run"
        assert (
            run_ranks(fork_server, directory, ranks, steps=8, gradient_accumulation=2, fsdp="on")
            == [0] * ranks
        ), output_of(directory)
    return folder


def test_each_rank_writes_its_own_rows(written):
    """Every file is valid safetensors; the concatenated shards are the full tensors."""
    names = {
        f"{part}-{rank}-of-2.safetensors"
        for part in ("weights", "optimizer", "ema")
        for rank in range(2)
    }
    assert files_of(written / "2" / "run", 8) == names | {"state.json", "manifest.json"}
    step = written / "2" / "run" / "step-00000008"
    first, second = (load_file(step / f"weights-{rank}-of-2.safetensors") for rank in range(2))
    whole = RunDirectory(written / "2" / "run").open_step(8).load_weights()
    assert first["embeddings.shared.weight"].shape == (12, 16)
    for name, tensor in whole.items():
        shards = [each[name] for each in (first, second) if name in each]
        assert torch.equal(torch.cat(shards), tensor), name
    assert "weights.safetensors" in files_of(written / "1" / "run", 8)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 2), (4, 2)])
def test_other_number_of_ranks_loads_the_same_bits(fork_server, written, tmp_path, before, after):
    """Weights, moments and EMA saved by some ranks and loaded by others are bit-identical."""
    source, copy = written / str(before) / "run", tmp_path / "copy" / "run"
    assert (
        run_ranks(
            fork_server, source, after, steps=8, gradient_accumulation=2, fsdp="on", copy=str(copy)
        )
        == [0] * after
    ), output_of(source)
    one, other = tensors_of(source), tensors_of(copy)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert f"weights-0-of-{after}.safetensors" in files_of(copy, 1) or after == 1


def test_run_resumes_with_and_without_fsdp(fork_server, tmp_path):
    directory, whole = tmp_path / "changing" / "run", tmp_path / "whole" / "run"
    for ranks, fsdp, steps in ((2, "on", 5), (1, "on", 10), (4, "on", 15), (2, "off", 20)):
        assert (
            run_ranks(
                fork_server, directory, ranks, steps=steps, gradient_accumulation=2, fsdp=fsdp
            )
            == [0] * ranks
        ), output_of(directory)
    assert run_ranks(fork_server, whole, 1, steps=20, gradient_accumulation=2) == [0]
    losses = [[record["loss"] for record in steps_of(each)] for each in (directory, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (
            "weights-1-of-2.safetensors",
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"),
        ),
        ("optimizer-0-of-2.safetensors", lambda path: path.unlink()),
        ("ema-1-of-2.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-8])),
    ],
    ids=["a byte", "a file", "a tail"],
)
def test_damaged_shard_is_named_and_the_previous_checkpoint_used(
    fork_server, tmp_path, caplog, name, damage
):
    directory = tmp_path / "run"
    assert run_ranks(
        fork_server, directory, 2, steps=8, gradient_accumulation=2, fsdp="on", validate_every=100
    ) == [0, 0]
    good = tensors_of(directory)
    damage(directory / "step-00000008" / name)
    assert RunDirectory(directory).latest().step == 4
    assert f"step-00000008/{name}" in caplog.text
    assert run_ranks(
        fork_server, directory, 2, steps=8, gradient_accumulation=2, fsdp="on", validate_every=100
    ) == [0, 0]
    assert name in next(directory.glob("bad-step-*/WHY.txt")).read_text()
    again = tensors_of(directory)
    assert all(torch.equal(good[key], again[key]) for key in good)


@pytest.mark.parametrize(
    "model",
    [
        {"share_layers": "all", "encoder": ["transformer*2"]},
        {"layer_drop": 0.4, "encoder": ["transformer*2"]},
        {"norm": "scale", "fix_norm": True, "qk_norm": "scale", "output_bias": True},
        {"tie_embeddings": "none", "embedding_width": 6},
        {"encoder": ["bilstm"], "decoder": ["lstm(attention=additive)"]},
        {"encoder": ["conv(layers=2)"], "decoder": ["conv(layers=2)"]},
        {"encoder": ["reformer(layers=2)"], "decoder": ["reformer(layers=2)"]},
    ],
    ids=lambda model: ", ".join(str(value) for value in model.values()),
)
def test_fsdp_supports_every_kind_of_model(fork_server, tmp_path, model):
    """Tied, shared and dropped layers, scalars, RNNs, and reversible layers.

    The gathered weights give the same validation losses, too.
    """
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    # Adam divides by a gradient's own size: the last bit of one that should be zero, a key's
    # bias for instance, becomes a whole step.
    settings = {"steps": 8, "gradient_accumulation": 3, "model": model, "epsilon": 1e-4}
    assert run_ranks(fork_server, one, 1, **settings) == [0], output_of(one)
    assert run_ranks(fork_server, two, 2, fsdp="on", **settings) == [0, 0], output_of(two)
    for records_of, count in ((steps_of, 8), (validations_of, 2)):
        losses = [[record["loss"] for record in records_of(each)] for each in (one, two)]
        assert len(losses[0]) == count
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "weights-1-of-2.safetensors" in files_of(two, 8)


def test_not_finite_on_one_rank_is_skipped_on_both(fork_server, tmp_path):
    directory = tmp_path / "run"
    assert run_ranks(
        fork_server, directory, 2, steps=8, gradient_accumulation=2, nan=[1, 5], fsdp="on"
    ) == [
        0,
        0,
    ], output_of(directory)
    assert [record["step"] for record in log_of(directory) if record.get("skipped")] == [5]
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(directory).values())


def test_a_signal_to_one_rank_stops_both_after_the_same_step(fork_server, tmp_path):
    directory = tmp_path / "run"
    ranks = start_ranks(
        fork_server,
        directory,
        2,
        steps=2000,
        gradient_accumulation=2,
        checkpoint_every=500,
        pause=0.02,
        fsdp="on",
    )
    wait_for_step(directory, 5)
    ranks[1].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [75, 75], output_of(directory)
    assert RunDirectory(directory).latest().step == last_step(directory)


def test_resumed_run_repeats_an_interrupted_validation_before_its_first_step(fork_server, tmp_path):
    """Rank 0 runs the forward passes alone, before FSDP has seen one of all ranks."""
    directory = tmp_path / "run"
    settings = {"steps": 8, "gradient_accumulation": 2, "fsdp": "on"}
    ranks = start_ranks(fork_server, directory, 2, faults={0: "valid.mid:1:stop"}, **settings)
    assert [rank.wait() for rank in ranks] == [75, 75], output_of(directory)
    assert not validations_of(directory)
    assert run_ranks(fork_server, directory, 2, **settings) == [0, 0], output_of(directory)
    assert [record["step"] for record in validations_of(directory)] == [4, 8]


@pytest.mark.timeout(60)  # the survivor has 30 s
def test_rank_whose_peer_died_exits_soon_and_publishes_nothing(fork_server, tmp_path):
    """A rank dies between two steps or within one: the others must not wait for long."""
    directory = tmp_path / "run"
    ranks = start_ranks(
        fork_server,
        directory,
        2,
        steps=2000,
        gradient_accumulation=2,
        checkpoint_every=1000,
        validate_every=1000,
        pause=0.02,
        fsdp="on",
    )
    wait_for_step(directory, 5)
    ranks[1].send()
    assert [rank.wait() for rank in ranks] == [75, -9]
    assert not list(directory.glob("step-*"))
    assert "all ranks of a run must stay alive; found on rank 0:" in output_of(directory)
    assert json.loads((directory / "status.json").read_text())["exit_code"] == 75


def test_a_rank_that_dies_while_it_writes_leaves_no_step(fork_server, tmp_path):
    directory = tmp_path / "run"
    settings = {"steps": 12, "gradient_accumulation": 2, "fsdp": "on", "validate_every": 100}
    ranks = start_ranks(
        fork_server,
        directory,
        2,
        faults={1: "publish.write.optimizer.safetensors:2:kill"},
        timeout=3.0,
        **settings,
    )
    assert [rank.wait() for rank in ranks] == [75, -9], output_of(directory)
    assert RunDirectory(directory).steps() == [4]
    assert "no heartbeat of rank 1" in output_of(directory)
    assert run_ranks(fork_server, directory, 2, **settings) == [0, 0]
    assert RunDirectory(directory).steps() == [4, 8, 12]
    assert not list(directory.glob(".tmp-*"))


def test_full_disk_on_one_rank_is_tolerated_by_all(fork_server, tmp_path):
    directory = tmp_path / "run"
    settings = {"steps": 12, "gradient_accumulation": 2, "fsdp": "on", "validate_every": 100}
    ranks = start_ranks(
        fork_server, directory, 2, faults={1: "publish.write.ema.safetensors:2:enospc"}, **settings
    )
    assert [rank.wait() for rank in ranks] == [0, 0], output_of(directory)
    assert RunDirectory(directory).steps() == [4, 12]


def test_autocast_multiplies_in_bfloat16(fork_server, tmp_path):
    """Weights are gathered in float32 and cast for matmuls, as in DDP; only sums are in another
    order.
    """
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    settings = {"steps": 8, "gradient_accumulation": 2, "precision": "bfloat16"}
    assert run_ranks(fork_server, one, 1, **settings) == [0], output_of(one)
    assert run_ranks(fork_server, two, 2, fsdp="on", **settings) == [0, 0], output_of(two)
    losses = [[record["loss"] for record in steps_of(each)] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert all(tensor.dtype == torch.float32 for tensor in tensors_of(two).values())
