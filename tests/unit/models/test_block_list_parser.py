"""Block lists as text: what is parsed, and the error for every mistake."""

from __future__ import annotations

import pytest

from dragoman.config import read_config
from dragoman.errors import ConfigError
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_list_parser import _BLOCK_ALIASES, MAX_BLOCKS, BlockSpec, parse_blocks


def test_blocks_are_written_out() -> None:
    assert parse_blocks(["transformer*2", "transformer(heads=4)"]) == [
        BlockSpec("transformer"),
        BlockSpec("transformer"),
        BlockSpec("transformer", {"heads": 4}),
    ]
    assert (
        parse_blocks([" transformer ( heads = 4 , ffn_width=8 ) * 2 "])
        == [BlockSpec("transformer", {"heads": 4, "ffn_width": 8})] * 2
    )


def test_values_are_numbers_truths_or_words() -> None:
    (spec,) = parse_blocks(["transformer(a=4, b=0.5, c=true, d=false, e=additive)"])
    assert spec.options == {"a": 4, "b": 0.5, "c": True, "d": False, "e": "additive"}
    assert parse_blocks([str(spec)]) == [spec]


def test_a_spec_is_written_as_it_is_read() -> None:
    assert str(BlockSpec("transformer")) == "transformer"
    assert (
        str(BlockSpec("transformer", {"heads": 4, "wide": True}))
        == "transformer(heads=4, wide=true)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trasnformer*6", "found 'trasnformer' in 'trasnformer*6'; did you mean transformer?"),
        ("perceptron", "found 'perceptron' in 'perceptron'; choose one of"),
        ("self*6", "found 'self' in 'self*6'; did you mean transformer?"),
        ("CNN", "found 'CNN' in 'CNN'; did you mean conv?"),
        (
            "transformer*x",
            "positive integer; found 'x' in 'transformer*x'; for example transformer*6",
        ),
        ("transformer*0", "found '0' in 'transformer*0'"),
        ("transformer*-1", "found '-1' in 'transformer*-1'"),
        ("transformer*1.5", "found '1.5' in 'transformer*1.5'"),
        ("transformer(4)", "name=value; found '4' in 'transformer(4)'"),
        ("transformer(heads=)", "found 'heads=' in 'transformer(heads=)'"),
        ("transformer(heads=4, heads=8)", "found 'heads' twice in"),
        ("transformer(heads=4", "found 'transformer(heads=4'; close every bracket"),
        ("transformer*2, transformer*3", "make each block an entry of its own"),
        ("", "found ''; write a block's name"),
        ("transformer 6", "remove or correct '6'"),
        ("6*transformer", "remove or correct '6*transformer'"),
        ("transformer(heads=4)x2", "remove or correct 'x2'"),
    ],
)
def test_mistakes_name_the_part(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_blocks([text], "model.decoder")
    assert message in str(error.value)
    assert str(error.value).startswith("model.decoder must")


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        parse_blocks(["slef", "transformer*x", "transformer(4)"])
    assert len(error.value.problems) == 3


def test_no_blocks_and_too_many_are_rejected() -> None:
    with pytest.raises(ConfigError, match="at least one block; found none"):
        parse_blocks([])
    with pytest.raises(ConfigError, match=f"at most {MAX_BLOCKS} blocks; found 1001"):
        parse_blocks(["transformer*999999999"])
    for texts in (["transformer"] * MAX_BLOCKS, [f"transformer*{MAX_BLOCKS}"]):
        assert len(parse_blocks(texts)) == MAX_BLOCKS


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "transformer" + " " * 200_000 + "!",
            "at most 1000 characters; found 200012, 'transformer    ",
        ),
        ("transformer(" + " " * 200_000 + "*", "at most 1000 characters; found 200013"),
        ("transformer" + "(" * 100_000, "at most 1000 characters; found 100011"),
        ("transformer" + " " * 900 + "!", "remove or correct '!'"),
        ("transformer*" + "9" * 900, "blocks; found 1001"),
        ("transformer*\u0663", "found '\u0663' in"),
    ],
)
def test_long_entries_are_rejected_at_once(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_blocks([text])
    assert message in str(error.value)


def test_a_long_list_is_rejected_before_its_entries_are_read() -> None:
    with pytest.raises(ConfigError, match=f"at most {MAX_BLOCKS} blocks; found 100000 entries"):
        parse_blocks(["nonsense"] * 100_000)


@pytest.mark.parametrize(
    "blocks",
    [
        ["lstm(layers=1000)*1000"],
        ["reformer(layers=500)*2", "transformer"],
        ["conv(layers=1000)", "transformer*1"],
    ],
)
def test_layers_inside_blocks_are_counted(blocks: list[str]) -> None:
    found = sum(int(spec.options.get("layers", 1)) for spec in parse_blocks(blocks))
    with pytest.raises(
        ConfigError,
        match=f"model.encoder must have at most {MAX_BLOCKS} layers in all; found {found:,};",
    ):
        read_config(overrides=[f"model.encoder={blocks}"])


def test_as_many_layers_as_allowed_are_accepted() -> None:
    assert read_config(overrides=["model.encoder=[lstm(layers=500)*2]"]).model.encoder


def test_parameters_are_counted_before_anything_is_built() -> None:
    message = (
        r"at most 10,000,000,000 parameters; found 1,024,000,000,000 in its feed-forward "
        r"networks; lower"
    )
    with pytest.raises(ConfigError, match=message):
        read_config(overrides=["model.decoder=transformer(ffn_width=1000000)*1000"])


def test_every_block_is_known_to_the_reader() -> None:
    assert [spec.name for spec in parse_blocks(list(BLOCKS))] == list(BLOCKS)


def test_block_names_of_other_toolkits_suggest_existing_blocks() -> None:
    assert set(_BLOCK_ALIASES.values()) <= set(BLOCKS)
    assert not set(_BLOCK_ALIASES) & set(BLOCKS)


def test_long_entries_are_rejected_before_they_are_parsed() -> None:
    longest = f"transformer({' ' * 987})"
    assert len(longest) == 1000
    assert parse_blocks([longest]) == [BlockSpec("transformer")]
    with pytest.raises(ConfigError, match="at most 1000 characters; found 1001, 'transformer"):
        parse_blocks([longest + " "])
