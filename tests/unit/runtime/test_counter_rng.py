"""Random numbers that must never change, because a resumed run depends on them."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.runtime.counter_rng import CounterRNG, derive_key, permutation, splitmix64_outputs


def splitmix64(state: int, count: int) -> list[int]:
    """The published algorithm, in plain integers."""
    word = (1 << 64) - 1
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & word
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        out.append(z ^ (z >> 31))
    return out


@pytest.mark.parametrize("key", [0, 1, 1234567, 2**64 - 1])
def test_outputs_are_splitmix64(key: int) -> None:
    assert splitmix64_outputs(key, np.arange(50)).tolist() == splitmix64(key, 50)


def test_outputs_do_not_depend_on_each_other() -> None:
    assert splitmix64_outputs(7, np.array([40]))[0] == splitmix64_outputs(7, np.arange(50))[40]


def test_known_outputs_never_change() -> None:
    """A resumed run needs the same order from every later release: these numbers are frozen."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert derive_key(1, "pairs", 0) == 6233532598200521401
    assert permutation(derive_key(1, "pairs", 0), 8).tolist() == [4, 0, 3, 7, 6, 1, 2, 5]
    assert CounterRNG(1, 2)() == 0.011761952128461761
    assert permutation(1, 8).tolist() == sorted(range(8), key=lambda i: splitmix64(1, 8)[i])


def test_permutation_holds_every_number_once_and_depends_on_the_key() -> None:
    first, second = permutation(1, 1000), permutation(2, 1000)
    assert sorted(first.tolist()) == list(range(1000))
    assert first.tolist() == permutation(1, 1000).tolist()
    assert first.tolist() != second.tolist()
    assert not len(permutation(1, 0))


def test_similar_parts_give_different_keys() -> None:
    assert len({derive_key(seed, "x", epoch) for seed in range(30) for epoch in range(30)}) == 900
    assert derive_key(1, 23) != derive_key(12, 3)


def test_draws_are_uniform_repeatable_and_never_zero() -> None:
    draw = CounterRNG(3, 4)
    values = [draw() for _ in range(20_000)]
    again = CounterRNG(3, 4)
    assert values == [again() for _ in range(20_000)]
    assert min(values) > 0
    assert max(values) <= 1
    assert abs(np.mean(values) - 0.5) < 0.01
    assert abs(np.mean(np.array(values) < 0.1) - 0.1) < 0.01
    assert values[:10] != [CounterRNG(3, 5)() for _ in range(10)]


def test_draws_are_the_outputs_in_order_over_several_blocks() -> None:
    draw, count = CounterRNG("x", 3), 3 * CounterRNG.BLOCK + 1
    expected = [((each >> 11) + 1) * 2.0**-53 for each in splitmix64(derive_key("x", 3), count)]
    assert [draw() for _ in range(count)] == expected


def test_a_key_can_be_read_in_either_byte_order() -> None:
    key = derive_key("x", 3)
    assert derive_key("x", 3, byteorder="big") == int.from_bytes(key.to_bytes(8, "little"), "big")
