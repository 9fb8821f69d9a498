import io
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from safe_trainer.utils import rng


def draw():
    """A few numbers from each generator, an odd count of cached normals among them."""
    return (
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        np.random.rand(2).tolist(),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    )


@pytest.fixture(autouse=True)
def _clean():
    with rng.isolated():
        rng.seed_everything(7)
        yield


@pytest.fixture
def other_numpy_generator():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    yield
    np.random.set_bit_generator(before)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("cached", [0, 1])
def test_capture_survives_a_weights_only_file(cached):
    for _ in range(cached):  # both twisters then hold a cached normal number
        np.random.randn()
        random.gauss(0, 1)
    state = through_a_file(rng.capture())
    expected = [draw() for _ in range(3)]
    rng.seed_everything(1)
    assert rng.restore(state) == []
    assert [draw() for _ in range(3)] == expected


def test_capture_knows_another_numpy_bit_generator(other_numpy_generator):
    state = through_a_file(rng.capture())
    snapshot = rng.Snapshot()
    expected = draw()
    rng.restore(state)
    assert draw() == expected
    snapshot.restore()
    assert draw() == expected


def test_restore_refuses_what_is_no_state():
    with pytest.raises(ValueError, match="missing: numpy, cuda"):
        rng.restore({"python": 1, "torch": 2})


def test_restore_names_the_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    state = rng.capture() | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    assert rng.restore(state) == ["cuda:0"]


@pytest.mark.parametrize("normals", range(4))
@pytest.mark.parametrize("disturbance", ["nothing", "uniform", "normal", "two normals", "seed", "all"])
def test_a_snapshot_is_taken_and_restored_any_number_of_times(normals, disturbance):
    disturb = {
        "nothing": lambda: None,
        "uniform": np.random.rand,
        "normal": np.random.randn,
        "two normals": lambda: np.random.randn(2),
        "seed": lambda: np.random.seed(7),
        "all": draw,
    }[disturbance]
    snapshot = rng.Snapshot()
    for _ in range(3):
        np.random.randn(normals)
        snapshot.take()
        expected = draw()
        for _ in range(2):
            disturb()
            snapshot.restore()
            assert draw() == expected


def test_take_sees_a_cached_normal_vanish_although_the_words_stay():
    np.random.randn()
    snapshot = rng.Snapshot()
    np.random.randn()  # hands out the cached one: the words do not move
    snapshot.take()
    expected = draw()
    snapshot.restore()
    assert draw() == expected


def test_a_snapshot_follows_a_change_of_numpys_bit_generator():
    snapshot = rng.Snapshot()
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        snapshot.take()
        expected = draw()
        snapshot.restore()
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_snapshots_state_is_independent_of_later_takes():
    snapshot = rng.Snapshot()
    state = snapshot.state()
    expected = draw()
    snapshot.take()
    rng.restore(state)
    assert draw() == expected


def test_isolated_restores_also_when_the_body_raises():
    state = rng.capture()
    expected = draw()
    rng.restore(state)

    @rng.isolated()
    def disturb():
        rng.seed_everything(3)
        draw()
        raise KeyError

    with pytest.raises(KeyError):
        disturb()
    assert draw() == expected


def test_seed_everything_is_the_usual_seeding():
    rng.seed_everything(11)
    ours = draw()
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    assert draw() == ours


def test_large_seeds_differ_in_every_generator():
    rng.seed_everything(5)
    low = draw()
    rng.seed_everything(5 + 2**32)
    high = draw()
    assert low[2:4] != high[2:4]  # NumPy's: it takes 32 bits only
    assert low[4:] != high[4:]


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "3", None])
def test_seed_everything_refuses(seed):
    with pytest.raises(ValueError, match="whole number from 0"):
        rng.seed_everything(seed)


def test_item_seeds_are_distinct_and_well_mixed():
    seeds = [rng.item_seed(s, e, i) for s in range(4) for e in range(10) for i in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    bits = np.array([[seed >> bit & 1 for bit in range(64)] for seed in seeds])
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / len(seeds) ** 0.5  # five standard deviations
    neighbours = (bits[1:] != bits[:-1]).sum(axis=1)
    assert abs(neighbours.mean() - 32) < 0.5


def test_seed_item_fixes_all_cpu_generators_whatever_was_drawn_before():
    rng.seed_item(0, 3, 17)
    expected = draw()
    draw()
    np.random.randn()
    rng.seed_item(0, 3, 17)
    assert draw() == expected
    for other in [(1, 3, 17), (0, 4, 17), (0, 3, 18)]:
        rng.seed_item(*other)
        assert all(a != b for a, b in zip(draw(), expected, strict=True))


def test_torch_and_numpy_do_not_follow_one_stream_after_seed_item():
    torch.manual_seed(5)
    np.random.seed(5)
    same = np.random.randint(0, 2**32, 50, dtype=np.uint32) & 0xFFFFFF  # torch.rand keeps 24 bits of a word
    assert (torch.rand(50, dtype=torch.float32).numpy() * 2**24).astype(np.uint32).tolist() == same.tolist()
    rng.seed_item(5, 0, 0)
    words = np.random.randint(0, 2**32, 50, dtype=np.uint32) & 0xFFFFFF
    assert (torch.rand(50, dtype=torch.float32).numpy() * 2**24).astype(np.uint32).tolist() != words.tolist()


def test_nothing_initialises_cuda():
    program = (
        "from safe_trainer.utils import rng; import torch\n"
        "rng.seed_everything(1); rng.seed_item(1, 2, 3); state = rng.capture(); rng.restore(state)\n"
        "with rng.isolated(): pass\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_snapshot_used_again_never_misses_a_move_of_pythons_generator():
    """Its memory is compared in place of reading it: every way to move it must show."""
    draw, snapshot = random.Random(7), rng.Snapshot()
    moves = [
        random.random,
        lambda: random.gauss(0, 1),  # the second of two takes a cached number and draws nothing
        lambda: random.getrandbits(32),
        lambda: random.seed(3),
        lambda: random.setstate(random.Random(5).getstate()),
        lambda: None,
    ]
    for _ in range(300):
        draw.choice(moves)()
        before = random.getstate()
        snapshot.take()
        for _ in range(draw.randint(0, 3)):
            draw.choice(moves)()
        snapshot.restore()
        assert random.getstate() == before
        assert snapshot.state()["python"]["cached"] == before[2]


def test_where_pythons_generator_cannot_be_read_as_memory_its_state_is_taken_instead(monkeypatch):
    monkeypatch.setattr(rng, "_PYTHON", None)
    snapshot = rng.Snapshot()
    random.random()
    snapshot.take()
    before = random.getstate()
    random.random()
    snapshot.restore()
    assert random.getstate() == before
