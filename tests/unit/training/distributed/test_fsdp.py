"""FSDP: when a model is sharded, its units, and errors where it cannot be.

Several ranks run in tests/faults.
"""

from __future__ import annotations

import errno
import types

import pytest
import torch
from training_kit import Corpus, fail_in_parts, tiny_model

from dragoman.checkpoint.checkpoint_io import ShardedTensors, shard_file_names
from dragoman.config import TrainConfig
from dragoman.data.batch_plan import Cursor
from dragoman.errors import BundleError, ConfigError, CorruptError, DiskError, DivergedError
from dragoman.storage.atomic_and_safe_file_io import FileRecord
from dragoman.storage.tensor_files import write_tensors
from dragoman.training.data_loader import DataLoader
from dragoman.training.distributed.data_parallel import ReplicatedDataParallel
from dragoman.training.distributed.fsdp import (
    ShardedDataParallel,
    choose_fsdp,
    find_fsdp_units,
    rank_rows,
)
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.model_and_optimizer_checkpoint import Checkpointer, _merge_file_records
from dragoman.training.torch_compile import choose_torch_compile
from dragoman.training.train_step import OOMSplitter

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "ranks", "device", "memory", "shared", "reason"),
    [
        ("on", 1, CPU, 0, False, "one process"),
        ("on", 2, CPU, 0, True, "as configured"),
        ("off", 2, GPU, 1, False, "as configured"),
        ("auto", 2, CPU, 0, False, "on cpu it is slower"),
        ("auto", 2, GPU, 1 << 30, False, "5 copies of the weights take 0 % of the GPU"),
        ("auto", 2, GPU, 1 << 17, True, "5 copies of the weights take 92 % of the GPU"),
        ("auto", 2, GPU, 1 << 18, False, "5 copies of the weights take 46 % of the GPU"),
        ("auto", 2, GPU, 7 << 15, True, "5 copies of the weights take 52 % of the GPU"),
    ],
)
def test_auto_fsdp_shards_models_that_do_not_fit(
    monkeypatch, wanted, ranks, device, memory, shared, reason
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(total_memory=memory),
    )
    found = choose_fsdp(TrainConfig(fsdp=wanted), tiny_model(), ranks=ranks, device=device)
    assert found.enabled is shared
    assert reason in found.reason


def test_ema_counts_as_one_more_copy(monkeypatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(total_memory=1 << 30),
    )
    assert (
        "6 copies"
        in choose_fsdp(TrainConfig(ema_decay=0.9), tiny_model(), ranks=2, device=GPU).reason
    )


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_auto_fsdp_shards_no_model_whose_optimizer_needs_whole_matrices(
    monkeypatch, optimizer: str
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=1)
    )
    config = TrainConfig(optimizer=optimizer)
    assert choose_fsdp(config, tiny_model(), ranks=2, device=GPU) == (
        False,
        f"{optimizer} needs whole matrices",
    )


def test_fsdp_disables_torch_compile() -> None:
    found = choose_torch_compile(TrainConfig(compile="on"), CPU, sharded=True)
    assert not found.enabled
    assert "communicates within the forward pass" in found.reason


def test_fsdp_units_are_blocks_without_shared_or_dropped_layers() -> None:
    assert len(find_fsdp_units(tiny_model(encoder=("transformer*3",)))) == 4
    assert find_fsdp_units(tiny_model(encoder=("transformer*3",), share_layers="attention")) == []
    assert find_fsdp_units(tiny_model(encoder=("transformer*3",), layer_drop=0.1)) == []


@pytest.mark.parametrize(("count", "ranks"), [(10, 4), (3, 4), (1, 2), (8, 2), (9, 3), (5, 4)])
def test_rank_rows_equal_torch_chunk(count: int, ranks: int) -> None:
    values = torch.arange(count)
    chunks = [piece.tolist() for piece in values.chunk(ranks)]
    ours = [values[rank_rows(count, rank=rank, ranks=ranks)].tolist() for rank in range(ranks)]
    assert ours == chunks + [[]] * (ranks - len(chunks))


@pytest.mark.parametrize(
    ("gradient_accumulation", "ranks"), [(1, 4), (2, 4), (3, 2), (5, 3), (4, 4)]
)
def test_lockstep_ranks_have_equally_many_micro_batches(
    gradient_accumulation: int, ranks: int
) -> None:
    """Idle micro-batches have weight zero.

    The others are those of ranks without lockstep.
    """
    corpus = Corpus()
    plan = corpus.plan()

    def global_batches(rank: int, lockstep: bool):
        feed = DataLoader(
            plan=plan,
            collate=corpus.collate(plan),
            gradient_accumulation=gradient_accumulation,
            seed=3,
            rank=rank,
            ranks=ranks,
            lockstep=lockstep,
            prefetch=0,
        )
        coming = feed.batches(1, Cursor(0, 0))
        return [next(coming) for _ in range(20)]

    together = [global_batches(rank, True) for rank in range(ranks)]
    assert all(
        len({len(update.micro_batches) for update in same}) == 1
        for same in zip(*together, strict=True)
    )
    for rank in range(ranks):
        for even, free in zip(together[rank], global_batches(rank, False), strict=True):
            busy = [part for part in even.micro_batches if not part.is_dummy]
            assert [(part.micro_index, part.split_index) for part in busy] == [
                (part.micro_index, part.split_index) for part in free.micro_batches
            ]
            assert all(len(part.batch) == 1 for part in even.micro_batches if part.is_dummy)


def test_a_batch_that_does_not_fit_cannot_be_split_by_one_rank_alone() -> None:
    corpus = Corpus()
    plan = corpus.plan()
    batch = corpus.collate(plan)(next(iter(plan.epoch(0))), 0)

    with pytest.raises(
        ConfigError,
        match=r"every rank; found out of memory with \d+ padded tokens of shape \d+x\d+; lower",
    ):
        fail_in_parts(OOMSplitter(), batch, torch.OutOfMemoryError("full"), may_split=False)
    seen = []
    for part in OOMSplitter().parts(batch, may_split=False):
        with part:
            seen.append((len(part.batch), part.path))
    assert seen == [(len(batch), "")]


def test_gradient_norm_counts_shards_of_all_ranks_and_replicated_scalars_once() -> None:
    """Two ranks with equal gradients: sums double, and so do the squares of the shards."""

    class TwoEqualRanks(ProcessGroup):
        def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
            tensor.mul_(2)

    parallel = object.__new__(ShardedDataParallel)
    parallel._world = TwoEqualRanks()
    parallel._local_params = [torch.zeros(2, 2), torch.zeros(()), torch.zeros(3), torch.zeros(())]
    parallel._replicated_indices = [1, 3]
    shard = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    reduced = parallel.all_reduce_gradients(
        [shard, torch.tensor(5.0), None, None], torch.tensor([7.0, 8.0]), step=1
    )
    assert reduced.sums.tolist() == [14.0, 16.0]
    assert reduced.gradients[0] is shard
    assert list(reduced.gradients[1:]) == [torch.tensor(10.0), None, torch.tensor(0.0)]
    assert float(reduced.grad_norm) == pytest.approx((2 * 30 + 10**2) ** 0.5)


# FSDP units


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({"weights.safetensors", "state.json"}, ["weights.safetensors"]),
        (
            {"weights-1-of-2.safetensors", "weights-0-of-2.safetensors"},
            ["weights-0-of-2.safetensors", "weights-1-of-2.safetensors"],
        ),
        (
            {f"weights-{rank}-of-11.safetensors" for rank in range(11)},
            [f"weights-{rank}-of-11.safetensors" for rank in range(11)],
        ),
        ({"weights-1-of-2.safetensors"}, []),
        ({"weights-0-of-2.safetensors", "weights-1-of-3.safetensors"}, []),
        ({"weights-0-of-999999999999.safetensors"}, []),
        ({"ema-0-of-1.safetensors"}, []),
    ],
)
def test_files_of_a_part_are_one_or_all_shards(names, found) -> None:
    assert shard_file_names("weights", names) == found


@pytest.fixture
def shards(tmp_path):
    torch.manual_seed(0)
    whole = {
        "matrix": torch.randn(7, 3),
        "short": torch.randn(1, 2),
        "number": torch.tensor(2.5),
        "vector": torch.randn(5).bfloat16(),
    }
    paths = []
    for rank in range(3):
        cut = {
            name: tensor[rank_rows(len(tensor), rank=rank, ranks=3)]
            for name, tensor in whole.items()
            if tensor.ndim
        }
        paths.append(tmp_path / f"weights-{rank}-of-3.safetensors")
        write_tensors(paths[-1], cut | ({"number": whole["number"]} if rank == 0 else {}))
    return whole, ShardedTensors(paths)


def test_shards_concatenate_to_the_full_tensor(shards) -> None:
    whole, stored = shards
    read = stored.read(expected=whole)
    assert read.keys() == whole.keys()
    assert all(torch.equal(read[name], whole[name]) for name in whole)


@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_any_rows_can_be_read(shards, ranks: int) -> None:
    whole, stored = shards
    for rank in range(ranks):
        wanted = {
            name: rank_rows(len(tensor), rank=rank, ranks=ranks)
            for name, tensor in whole.items()
            if tensor.ndim
        }
        read = stored.read(rows=wanted.get)
        assert torch.equal(read["number"], whole["number"])
        assert all(torch.equal(read[name], whole[name][rows]) for name, rows in wanted.items())


def test_shards_of_another_model_are_rejected(shards) -> None:
    whole, stored = shards
    with pytest.raises(
        BundleError, match=r"which has matrix F32 \[8, 3\]; found matrix F32 \[7, 3\]"
    ):
        stored.check_shapes_match(whole | {"matrix": torch.empty(8, 3)})


@pytest.mark.parametrize(
    ("below", "found"),
    [
        (torch.zeros(2, 4), r"F32 \[2, 4\]"),
        (torch.zeros(2, 3, dtype=torch.float16), r"F16 \[2, 3\]"),
        (torch.zeros(()), r"F32 \[\]"),
    ],
)
def test_mismatched_shards_are_corrupt(tmp_path, below, found) -> None:
    paths = [tmp_path / f"weights-{rank}-of-2.safetensors" for rank in range(2)]
    write_tensors(paths[0], {"matrix": torch.zeros(2, 3)})
    write_tensors(paths[1], {"matrix": below})
    with pytest.raises(
        CorruptError,
        match=rf"weights-1-of-2.safetensors must .* found matrix {found} after F32 \[2, 3\]",
    ):
        _ = ShardedTensors(paths).header


# What the ranks wrote


def test_error_of_one_rank_is_raised_on_rank_zero(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    good = {"files": {"a": [5, "abc"]}}
    assert _merge_file_records([good], tmp_path) == {"a": FileRecord(5, "abc")}
    with pytest.raises(OSError, match="No space left on device on rank 1") as caught:
        _merge_file_records(
            [good, {"errno": errno.ENOSPC, "error": "No space left on device on rank 1"}], tmp_path
        )
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(DivergedError, match="found weights x between nan and nan"):
        _merge_file_records([good, {"diverged": "weights x between nan and nan"}], tmp_path)
    with pytest.raises(DiskError, match="found no file for b, of which 7 bytes were written"):
        _merge_file_records([good, {"files": {"b": [7, "def"]}}], tmp_path)


def test_fsdp_without_a_shared_disk_is_rejected(tmp_path) -> None:
    class Elsewhere(ProcessGroup):
        def run_with_ranks(self, compute, part, what):
            return compute(lambda word: [part(word), False])

    run = types.SimpleNamespace(path=tmp_path)
    model = tiny_model()
    checkpointer = Checkpointer(
        run,
        model=model,
        parallel=ReplicatedDataParallel(model, ProcessGroup()),
        optimizer=None,
        ema=None,
        world=Elsewhere(),
    )
    with pytest.raises(
        ConfigError,
        match=r"that all ranks share; found a file of rank 0 in .* that rank 1 does not see",
    ):
        checkpointer._check_shared_disk()
    assert not list(tmp_path.iterdir())
