"""Examples that are held out for validation."""

from __future__ import annotations

from dragoman.runs.validation_split import is_held_out


def test_one_pair_in_fifty_of_the_first_fifty_thousand_is_held_out() -> None:
    found = [number for number in range(1, 50_201) if is_held_out(number)]
    assert [(number - 1) // 50 for number in found] == list(range(1000))


def test_the_last_pair_may_be_held_out() -> None:
    last = [is_held_out(4, every=2, within=4, seed=seed) for seed in range(40)]
    assert 0 < sum(last) < 40
    assert not any(is_held_out(5, every=2, within=4, seed=seed) for seed in range(40))


def test_another_seed_holds_out_others() -> None:
    one, same, other = (
        [number for number in range(1, 1001) if is_held_out(number, every=10, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert len(one) == len(other) == 100
    assert one == same != other
