import numpy as np
import pytest

from safe_trainer.recipes.splits import mixed, stratified, three_parts

LABELS = np.array([0] * 50 + [1] * 30 + [2] * 20)


@pytest.mark.parametrize(("held_out", "counts"), [(10, [5, 3, 2]), (0.2, [10, 6, 4]), (0, [0, 0, 0])])
def test_each_class_gives_its_share(held_out, counts):
    rest, chosen = stratified(LABELS, held_out)
    assert np.bincount(LABELS[chosen], minlength=3).tolist() == counts
    assert sorted([*rest, *chosen]) == list(range(100))


def test_what_is_held_out_is_mixed():
    labels = np.repeat(np.arange(10), 100)
    rest, chosen = stratified(labels, 0.5)
    assert (np.diff(rest) > 0).all()
    assert len(set(labels[chosen[:50]])) == 10
    assert sorted(mixed(20)) == list(range(20))
    assert list(mixed(20)) == list(mixed(20)) != list(mixed(20, seed=1))


def test_the_total_is_exact_where_shares_are_not_whole():
    _, chosen = stratified(LABELS, 13)
    assert len(chosen) == 13


def test_the_choice_is_fixed_by_its_seed_alone():
    assert np.array_equal(stratified(LABELS, 10)[1], stratified(LABELS, 10)[1])
    assert not np.array_equal(stratified(LABELS, 10)[1], stratified(LABELS, 10, seed=1)[1])
    np.random.seed(5)
    state = np.random.get_state()[1].copy()
    stratified(LABELS, 10)
    assert np.array_equal(np.random.get_state()[1], state)


@pytest.mark.parametrize("held_out", [100, 101, -1, 1.0])
def test_something_must_be_left_to_train_on(held_out):
    with pytest.raises(ValueError, match="must be smaller than the data"):
        stratified(LABELS, held_out)


def test_three_parts_share_no_sample():
    parts = three_parts(LABELS, 0.2, 0.1)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 70, "val": 20, "test": 10}
    assert sorted(np.concatenate(list(parts.values()))) == list(range(100))


def test_a_part_of_no_samples_is_left_out():
    assert list(three_parts(LABELS, 0.0, 0.0)) == ["train"]


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.5, 0.5)])
def test_shares_out_of_range_are_refused(shares):
    with pytest.raises(ValueError, match=r"data\.val_share and data\.test_share"):
        three_parts(LABELS, *shares)
