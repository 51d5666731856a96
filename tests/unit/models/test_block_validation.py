"""Invalid block lists are rejected when a configuration is read, with a reason and a remedy."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from dragoman.attention.catalogue import ALIGNMENTS, POSITIONS, SCORES
from dragoman.config import Config, ModelConfig, list_settings, read_config
from dragoman.errors import ConfigError
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_interface import Block, BuildContext
from dragoman.models.block_options import BlockOptions, resolve_attention
from dragoman.models.block_validation import block_options_type
from dragoman.models.factory import build_model
from dragoman.registry import Entry, Registry

ROOT = Path(__file__).resolve().parents[3]

# Overrides, then parts of the expected message: the reason, the found value, the remedy.
INVALID = [
    (
        ["model.decoder=[transformer(attention=monotonic)]"],
        [
            "'attention' in 'transformer(attention=monotonic)'",
            "computes all positions in parallel",
            "monotonic depends on the previous position",
            "use lstm(attention=monotonic)",
        ],
    ),
    (
        ["model.encoder=[transformer(alignment=local_m)]"],
        [
            "'transformer(alignment=local_m)'",
            "local_m depends on the previous position",
            "use lstm",
        ],
    ),
    (
        ["model.decoder=[transformer(score=additive)]"],
        [
            "'transformer(score=additive)'",
            "scaled dot-product attention only",
            "or use lstm(attention=additive)",
        ],
    ),
    (
        ["model.decoder=[cross_attention(alignment=mocha)]"],
        ["'cross_attention(alignment=mocha)'", "use lstm(attention=mocha)"],
    ),
    (
        ["model.encoder=[lstm(window=5)]"],
        [
            "'lstm(window=5)'",
            "has no window over its own sequence",
            "use transformer(window=5)",
            "alignment=local_p",
        ],
    ),
    (["model.decoder=[gru(window=5)]"], ["'gru(window=5)'", "use transformer(window=5)"]),
    (
        ["model.encoder=[conv(window=5)]"],
        ["'conv(window=5)'", "conv(kernel_size=5) sees 2 positions"],
    ),
    (["model.encoder=[bilstm(window=5)]"], ["'bilstm(window=5)'", "use transformer(window=5)"]),
    (
        ["model.encoder=[lstm]", "model.decoder=[lstm]", "model.window=4"],
        ["model.window=4", "found lstm, lstm", "set model.window=0"],
    ),
    (
        ["model.encoder=[lstm]", "model.decoder=[conv]", "model.positions=rotary"],
        ["model.positions=rotary", "try sinusoidal"],
    ),
    (
        ["model.decoder=[lstm(attention=dot, alignment=location_sensitive)]"],
        [
            "adds terms inside an additive score",
            "found attention=dot",
            "use attention=additive or normed_additive",
        ],
    ),
    (
        ["model.decoder=[gru(attention=scaled_dot, alignment=coverage)]"],
        ["found attention=scaled_dot", "use attention=additive"],
    ),
    (["model.heads=7"], ["model.heads must divide", "found 7 and 256", "try model.heads=4 or 8"]),
    (
        ["model.encoder=[transformer(heads=12)*2]"],
        ["'transformer(heads=12)'", "found 12 and 256", "try model.heads=8 or 16"],
    ),
    (
        ["model.kv_heads=3"],
        ["model.kv_heads must divide model.heads", "found 3 and 4", "try model.kv_heads=2 or 4"],
    ),
    (
        ["model.decoder=[transformer(kv_heads=3)]"],
        ["'transformer(kv_heads=3)'", "found 3 and 4", "try model.kv_heads=2 or 4"],
    ),
    (
        ["model.positions=rotary", "model.head_width=5"],
        ["must be even for rotary", "found 5", "set an even model.head_width"],
    ),
    (
        ["model.positions=rotary", "model.encoder=[transformer(head_width=7)]"],
        ["'transformer(head_width=7)'", "found 7", "set an even"],
    ),
    (
        ["model.decoder=[bilstm]"],
        ["must be causal", "found bilstm", "use lstm, or put bilstm into model.encoder"],
    ),
    (["model.decoder=[transformer, bigru*2]"], ["found bigru", "use gru"]),
    (
        ["model.encoder=[cross_attention]"],
        ["must have no cross-attention", "found cross_attention", "put it into model.decoder"],
    ),
    (
        ["model.encoder=[lstm(attention=additive)]"],
        ["is for decoders", "found attention=additive", "move the block to model.decoder"],
    ),
    (
        ["model.encoder=[bilstm(attention=additive)]"],
        ["'bilstm(attention=additive)'", "use lstm(attention=additive) in model.decoder"],
    ),
    (
        ["model.encoder=[bigru(layers=3)]"],
        ["'bigru(layers=3)'", "repeat the block instead: bigru*3"],
    ),
    (
        ["model.encoder=[gru(initial_state=last)]"],
        ["initial_state is for decoders", "found initial_state=last", "leave it out"],
    ),
    (
        ["model.decoder=[lstm(reverse=true)]"],
        ["found reverse=true in a decoder", "use it in model.encoder"],
    ),
    (["model.decoder=[ffn*2]"], ["must read the source", "found ffn*2", "add cross_attention"]),
    (
        ["model.decoder=[conv(attention=none), lstm(initial_state=zero)]"],
        ["must read", "found conv(attention=none), lstm(initial_state=zero)"],
    ),
    (
        ["model.decoder=[lstm(alignment=monotonic)]"],
        ["alignment needs attention", "alignment=monotonic with attention=none", "set attention="],
    ),
    (
        ["model.decoder=[lstm(attention=mocha, radius=3)]"],
        [
            "radius is for alignment local_m or local_p or location_sensitive",
            "found radius=3 with attention=mocha;",
        ],
    ),
    (
        ["model.decoder=[gru(attention=additive, coverage_loss_weight=0.5)]"],
        ["coverage_loss_weight is for alignment coverage", "found coverage_loss_weight=0.5"],
    ),
    (
        ["model.decoder=[gru(smoothing=true)]"],
        [
            "smoothing is for alignment location_sensitive",
            "found smoothing=true with attention=none",
        ],
    ),
    (
        ["model.decoder=[lstm(decoder=bahdanau)]"],
        ["decoder needs attention", "found decoder=bahdanau"],
    ),
    (
        ["model.decoder=[lstm(attention=mocha, alignment=hard)]"],
        ["one alignment", "attention=mocha and alignment=hard", "attention=additive"],
    ),
    (
        ["model.decoder=[lstm(alignment=additive)]"],
        ["additive is a score, not an alignment", "write attention=additive"],
    ),
    (
        ["model.decoder=[lstm(heads=4)]"],
        ["'lstm(heads=4)'", "single-head attention", "use transformer"],
    ),
    (
        ["model.decoder=[conv(heads=4)]"],
        ["'conv(heads=4)'", "single-head dot-product attention", "use lstm or transformer"],
    ),
    (
        ["model.encoder=[conv(kernel_size=4)]"],
        ["odd in an encoder", "found 4", "try kernel_size=5"],
    ),
    (["model.encoder=[trasnformer*2]"], ["found 'trasnformer'", "did you mean transformer?"]),
    (["model.encoder=[transformer(haeds=4)]"], ["found 'haeds'", "did you mean heads?"]),
    (["model.decoder=[lstm(attention=aditive)]"], ["found 'aditive'", "did you mean additive?"]),
    (
        ["model.decoder=[lstm(attention=additive, alignment=monotone)]"],
        ["found 'monotone'", "did you mean monotonic?"],
    ),
    (["model.decoder=[lstm(layers=0)]"], ["layers of 'lstm(layers=0)'", "at least 1", "found 0"]),
    (["model.decoder=[conv(layers=0)]"], ["layers of 'conv(layers=0)'", "found 0"]),
    (["model.encoder=[transformer*0]"], ["by a positive integer", "found '0'"]),
    (["model.window=-1"], ["model.window must be at least 0", "found -1"]),
    (
        ["model.encoder=[transformer(window=-1)]"],
        ["window of 'transformer(window=-1)'", "found -1"],
    ),
    (
        ["model.decoder=[]"],
        ["model.decoder must list at least one block", "found none", "for example [transformer*6]"],
    ),
    (
        ["model.encoder=[bilstm]", "model.width=7", "model.heads=1", "model.positions=none"],
        ["must be even for a bidirectional RNN", "found 7", "model.width=8"],
    ),
    (
        ["model.tie_embeddings=all", "text.shared_vocab=false"],
        [
            "model.tie_embeddings=all needs one vocabulary",
            "found text.shared_vocab=false",
            "set model.tie_embeddings=target",
        ],
    ),
]


def config_error(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_config(recipe="tiny", overrides=["model.width=256", "model.heads=4", *overrides])
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "messages"), INVALID, ids=lambda part: part[0] if isinstance(part, list) else None
)
def test_invalid_block_lists_are_rejected_when_parsed(
    overrides: list[str], messages: list[str]
) -> None:
    message = str(config_error(*overrides))
    assert [part for part in messages if part not in message] == [], message
    assert "\n" not in message, "one mistake is one problem"


def test_a_file_and_a_configuration_made_in_python_are_checked_alike(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "model:\n  decoder: ['lstm(attention=dot, alignment=coverage)']\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="use attention=additive"):
        read_config(file=file)
    model = ModelConfig(decoder=("bilstm",))
    (problem,) = Config(model=model).problems()
    assert "found bilstm" in problem
    with pytest.raises(ConfigError, match="found bilstm"):
        build_model(model, src_vocab_size=9, tgt_vocab_size=9)


def test_all_problems_of_both_stacks_are_reported_together() -> None:
    found = config_error(
        "model.encoder=[transformer(heads=3)*6, lstm(window=2)]",
        "model.decoder=[bilstm, nothing]",
        "text.shared_vocab=false",
    ).problems
    assert [
        any(word in problem for problem in found)
        for word in ("found 3 and", "'window'", "'nothing'", "text.shared_vocab")
    ] == [True] * 4
    assert (
        len(found) == 4
    )  # a repeated block is reported once; for a list that does not parse, only the parse errors


def test_commas_inside_brackets_do_not_tear_a_block_apart(tmp_path: Path) -> None:
    wanted = ("lstm(attention=additive, layers=2, residual_connection=false)", "transformer*2")
    assert read_config(overrides=[f"model.decoder=[{', '.join(wanted)}]"]).model.decoder == wanted
    file = tmp_path / "blocks.yaml"
    file.write_text(f"model:\n  decoder: [{', '.join(wanted)}]\n", encoding="utf-8")
    assert read_config(file=file).model.decoder == wanted
    assert "found 'transformer(heads=4'; close every bracket" in str(
        config_error("model.encoder=['transformer(heads=4', transformer]")
    )


def test_heads_matter_only_to_blocks_that_have_some() -> None:
    read_config(
        recipe="tiny",
        overrides=[
            "model.width=50",
            "model.heads=8",
            "model.encoder=[bilstm]",
            "model.decoder=[gru(attention=dot)]",
        ],
    )
    own = "transformer(heads=5)"
    read_config(
        recipe="tiny",
        overrides=[
            "model.width=50",
            "model.heads=8",
            f"model.encoder=[{own}]",
            f"model.decoder=[{own}]",
        ],
    )
    (problem,) = config_error("model.width=50", "model.heads=8", f"model.encoder=[{own}]").problems
    assert problem == "model.heads must divide model.width; found 8 and 50; try model.heads=5 or 10"


def test_validation_imports_no_torch() -> None:
    code = """
import sys
from dragoman.config import read_config
from dragoman.errors import ConfigError
accepted = [
    "model.encoder=[conv(kernel_size=5)*2, transformer(heads=2, window=3), bilstm]",
    "model.decoder=[gru(attention=monotonic), cross_attention, transformer]",
]
refused = ["model.decoder=[transformer(attention=monotonic), lstm(layers=0), bilstm]"]
read_config(recipe="tiny", overrides=accepted)
try:
    read_config(recipe="tiny", overrides=refused)
except ConfigError as error:
    assert len(error.problems) == 3, error
else:
    raise SystemExit("not refused")
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_blocks_options_are_listed_as_its_builder_takes_them(name: str) -> None:
    """The options class is read without torch; the builder must have the same arguments."""
    assert BLOCKS[name].options, (
        f"list the options of {name} in dragoman/models/block_options.py, and name that "
        f"class in its entry"
    )
    kind, listed = BLOCKS.load(name), block_options_type(name)
    assert kind.overridable == listed.overridable
    hints = get_type_hints(kind.build)
    own = {
        each.name: (hints[each.name], each.default)
        for each in inspect.signature(kind.build).parameters.values()
        if each.name != "build_context"
    }
    assert {each.name: (each.type, each.default) for each in list_settings(listed)} == own
    assert all(each.setting.doc for each in list_settings(listed))
    assert set(listed.overridable) <= {each.name for each in list_settings(ModelConfig)}


@pytest.mark.parametrize(
    "registry", [SCORES, ALIGNMENTS, POSITIONS], ids=lambda registry: registry.kind
)
def test_traits_match_the_code(registry: Registry) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    for name, entry in registry.items():
        kind = registry.load(name)
        if registry is SCORES:
            found = {"accepts_features"} if kind.accepts_features else set()
        elif registry is ALIGNMENTS:
            member = kind(query_width=2, key_width=2, score_width=2)
            found = {"has_score_features"} if member.has_score_features else set()
            found |= (
                {"stateful"} if set(member.start(mask)) - {"mask", "length"} else set()
            )  # more than what the source is
        else:
            found = (
                set()
                if kind.build_relative_position(heads=2, head_width=4, causal=True) is None
                else {"in_attention"}
            )
        assert set(entry.traits) == found, name


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_an_alignment_alone_brings_a_score_that_fits(alignment: str) -> None:
    score, same = resolve_attention(alignment, "softmax")
    assert (score in SCORES, same) == (True, alignment)
    config = read_config(recipe="tiny", overrides=[f"model.decoder=[lstm(attention={alignment})]"])
    with torch.device("meta"):
        (block,) = (
            block
            for _, block in build_model(
                config.model, src_vocab_size=9, tgt_vocab_size=9
            ).decoder.blocks()
        )
    assert isinstance(block.cross.alignment, ALIGNMENTS.load(alignment))  # type: ignore[union-attr]
    assert isinstance(block.cross.score, SCORES.load(score))  # type: ignore[union-attr]


class Own(Block):
    """A user-defined block, whose options are listed in its builder only."""

    overridable = ("dropout",)

    @classmethod
    def build(cls, build_context: BuildContext, *, depth: int = 2, gentle: bool = False) -> Own:
        block = cls()
        block.depth = depth  # type: ignore[assignment]
        return block


@pytest.fixture
def own() -> Iterator[str]:
    BLOCKS.add("own", Entry(f"{__name__}:Own", "Does nothing."))
    yield "own"
    del BLOCKS._entries["own"]


def test_a_block_without_a_list_is_known_by_its_builder(own: str) -> None:
    listed = block_options_type(own)
    assert issubclass(listed, BlockOptions)
    assert dataclasses.asdict(listed()) == {"depth": 2, "gentle": False}
    assert read_config(
        overrides=["model.encoder=[own(depth=3, dropout=0.2)]", "model.positions=rotary"]
    ).model.encoder
    others = "model.decoder=[lstm(attention=additive)]"  # no other block has self-attention
    for position in ("model.positions=rotary", "model.window=3"):
        assert read_config(overrides=["model.encoder=[own]", others, position]).model.encoder
    with pytest.raises(ConfigError, match=r"found 'deptj' in 'own\(deptj=3\)'; did you mean depth"):
        read_config(overrides=["model.encoder=[own(deptj=3)]"])
    with pytest.raises(ConfigError, match="must be an integer; found 'deep'"):
        read_config(overrides=["model.encoder=[own(depth=deep)]"])
    model = build_model(
        ModelConfig(encoder=("own(depth=5)",), width=8, heads=2, ffn_width=8),
        src_vocab_size=9,
        tgt_vocab_size=9,
    )
    assert [block.depth for _, block in model.encoder.blocks()] == [5]


def test_custom_score_with_features_needs_no_trait() -> None:
    SCORES.add(
        "own_additive",
        Entry(
            "dragoman.attention.score_functions:AdditiveScore",
            "The additive score by another name.",
        ),
    )
    try:
        read_config(overrides=["model.decoder=[lstm(attention=own_additive, alignment=coverage)]"])
    finally:
        del SCORES._entries["own_additive"]
