"""Every recipe: the preflight finds nothing, and training after it ends in the bits of training without it."""

import pytest
import torch

from safe_trainer import __main__ as cli
from safe_trainer.build import build

RECIPES = [name for name in cli.options("recipe", cli.conf_folders(None)) if not name.startswith("broken/")]
SLOW = pytest.mark.slow  # a ResNet-18 of full size


def trained(recipe, folder, data, *, preflight):
    options = [f"+recipe={recipe}", "max_steps=12", "limit_val_batches=1", "progress=false", "device=cpu", "logger={}"]
    options += [f"preflight.enabled={preflight}", "preflight.budget_s=90", "seed=3"]
    options += [*data, "loader.batch_size=8"] if recipe.endswith("cifar") else []
    config = cli.checked(cli.composed(cli.readable_overrides(options, cli.conf_folders(None)), None))
    trainer = build(config, folder)
    report = trainer.run()
    bits = [*trainer.model.state_dict().values(), torch.get_rng_state(), torch.tensor(report.history["loss"])]
    return bits, report


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=SLOW if "cifar" in name else ()) for name in RECIPES])
def test_training_ends_in_the_same_bits_with_and_without(recipe, tmp_path, cifar10_in_small):
    ours, report = trained(recipe, tmp_path / "on", cifar10_in_small, preflight=True)
    without, _ = trained(recipe, tmp_path / "off", cifar10_in_small, preflight=False)
    assert [finding for finding in report.findings if finding.is_alarm] == []
    assert not [check for check in report.checks if "itself failed" in check.evidence]
    assert all(torch.equal(one, other) for one, other in zip(ours, without, strict=True))
