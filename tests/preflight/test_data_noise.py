"""Labels that are likely wrong, listed on request."""

import re

import torch
from preflight.checking import classifier, groups
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safe_trainer import SafeTrainer
from safe_trainer.data import OrderedLoader


def asked(folder, inputs, labels, *, wanted=True, loader=None):
    model = classifier()
    config = {
        "progress": False, "preflight.checks": ["data"], "preflight.label_noise": wanted, "run_dir": str(folder),
    }  # fmt: skip
    loader = loader or DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    (result,) = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, config=config).preflight()
    return result


def places(found):
    return {int(row) for row in re.findall(r"sample (\d+) of the data set", found.evidence)}


def flipped(labels, rows):
    wrong = labels.clone()
    wrong[rows] = (wrong[rows] + 1) % 3
    return wrong


def test_flipped_labels_are_listed_by_their_place_in_the_data_set(tmp_path):
    inputs, labels = groups(samples=400, spread=0.5)
    rows = torch.tensor([3, 50, 77, 120, 200, 333])
    result = asked(tmp_path, inputs, flipped(labels, rows))
    (found,) = result.findings
    assert (found.fault, str(found.severity), result.status.value) == ("data.label_noise", "info", "pass")
    assert places(found) == set(rows.tolist())
    assert f"sample 3 of the data set has {(int(labels[3]) + 1) % 3} and looks like {int(labels[3])}" in found.evidence


def test_the_projects_own_loader_tells_places_too(tmp_path):
    inputs, labels = groups(samples=400, spread=0.5)
    rows = torch.tensor([7, 99, 250])
    data = TensorDataset(inputs, flipped(labels, rows))
    loader = OrderedLoader(data, batch_size=32, seed=5, shuffle=True)
    result = asked(tmp_path, inputs, labels, loader=loader)
    assert places(result.findings[0]) == {7, 99, 250}


def test_right_labels_and_silence_unless_asked(tmp_path):
    inputs, labels = groups(samples=400, spread=0.5)
    assert asked(tmp_path / "right", inputs, labels).findings == ()
    wrong = flipped(labels, torch.arange(0, 60))
    assert asked(tmp_path / "unasked", inputs, wrong, wanted=False).findings == ()


def test_labels_that_no_simple_model_learns_are_not_judged(tmp_path):
    inputs, _ = groups(samples=400)
    result = asked(tmp_path, inputs, torch.randint(3, (400,), generator=torch.Generator().manual_seed(9)))
    assert "label noise: no simple model learns these labels" in result.evidence
