"""Data that stands in for what a recipe would download."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def cifar10_in_small(tmp_path):
    noise = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 1)):
        for label in range(10):
            folder = tmp_path / "cifar10" / part / str(label)
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return [f"data.root={tmp_path / 'cifar10'}", "data.val_count=10"]
