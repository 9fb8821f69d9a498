"""The learning-rate finder: its curve, its suggestion, its files, and the check on the configured rate."""

import csv
import json
import math
import subprocess
import sys

import pytest
import torch
from programs import blobs, equal, fingerprint, loader_of, mlp
from torch import nn

from safe_trainer import ConfigError, SafeTrainer
from safe_trainer.__main__ import main


def trainer_of(tmp_path, model=None, loss=None, *, lr=0.1, loader=None, optimizer=torch.optim.SGD, **options):
    model = mlp() if model is None else model
    chosen = optimizer(model.parameters(), lr=lr)
    config = {"progress": False, "run_dir": str(tmp_path / "run"), "preflight.checks": ["learning_rate"]}
    return SafeTrainer(
        model, loss or nn.CrossEntropyLoss(), chosen, loader or loader_of(blobs()), config=config, **options
    )


class Bowl(nn.Module):
    """Half the curvature times the square of one weight: gradient descent diverges beyond 2 / curvature."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        return self.weight * torch.ones(len(inputs))


@pytest.mark.parametrize("curvature", [2.0, 20.0, 200.0])
def test_the_ramp_ends_where_theory_says_that_it_diverges(curvature, tmp_path):
    def loss(output, target):
        return 0.5 * curvature * output.square().mean() + 0.1 * curvature

    curve = trainer_of(tmp_path, Bowl(), loss).find_lr()
    edge = 2 / curvature
    assert edge / 2 < curve.diverged_at < 20 * edge
    assert curve.suggestion < edge / 2
    assert curve.valley < edge


def test_the_smoothing_begins_without_bias_and_rates_are_even_on_a_log_axis(tmp_path):
    curve = trainer_of(
        tmp_path, loader=list(loader_of(blobs()))[:1]
    ).find_lr()  # of one batch, so that nothing is taken off
    assert curve.smoothed[0] == pytest.approx(curve.losses[0])
    assert curve.smoothed[1] == pytest.approx((0.9 * curve.losses[0] + curve.losses[1]) / 1.9)
    ratios = [b / a for a, b in zip(curve.rates, curve.rates[1:], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert curve.rates[0] == pytest.approx(1e-7)


def test_all_is_put_back_and_the_files_say_the_same(tmp_path):
    trainer = trainer_of(tmp_path, optimizer=torch.optim.AdamW)
    before = [*fingerprint(trainer.model, trainer.optimizers[0]), torch.get_rng_state()]
    curve = trainer.find_lr()
    assert equal(before, [*fingerprint(trainer.model, trainer.optimizers[0]), torch.get_rng_state()])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    with (trainer.folder / "lr_finder.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lr"]) for row in rows] == curve.rates
    assert [float(row["loss"]) for row in rows] == curve.losses
    assert (trainer.folder / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
    script = [sys.executable, trainer.folder / "plot_lr_finder.py"]
    drawn = subprocess.run(script, env={"MPLBACKEND": "agg"}, capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr


def test_a_loss_that_becomes_nan_ends_the_ramp(tmp_path):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, inputs):
            output = self.net(inputs)
            return output if self.net[0].weight.abs().max() < 2 else output * math.nan

    curve = trainer_of(tmp_path, Fragile()).find_lr()
    assert curve.diverged_at is not None
    assert all(map(math.isfinite, curve.losses))


def test_batches_that_are_harder_than_others_do_not_bend_the_curve(tmp_path):
    def batch(size):
        inputs, labels = next(iter(loader_of(blobs(samples=16))))
        return inputs * size, labels

    model = nn.Linear(8, 3)
    curve = trainer_of(tmp_path, model, loader=[batch(0.1), batch(5.0), batch(1.0)]).find_lr()
    assert max(curve.losses[:9]) > 1.5 * min(curve.losses[:9])
    assert curve.smoothed[:9] == pytest.approx([curve.smoothed[0]] * 9, rel=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_suggested_rate_trains(optimizer, tmp_path):
    trainer = trainer_of(tmp_path, optimizer=optimizer, lr=1e-3)
    curve = trainer.find_lr()
    assert 1e-4 < curve.suggestion < 1
    trainer.optimizers[0].param_groups[0]["lr"] = curve.suggestion
    losses = trainer.fit().history["loss"]
    assert losses[-1] < 0.5 * losses[0]


def test_a_program_that_raises_is_told(tmp_path):
    def loss(output, target):
        raise ValueError("my own mistake")

    with pytest.raises(ConfigError, match="no learning rate can be found: ValueError: my own mistake"):
        trainer_of(tmp_path, loss=loss).find_lr()


def test_there_is_no_suggestion_where_nothing_is_learnt(tmp_path):
    def loss(output, target):
        return output.mean() * 0 + 1.0

    curve = trainer_of(tmp_path, loss=loss).find_lr()
    assert (curve.suggestion, curve.valley) == (None, None)
    assert "no suggestion" in curve.reason


def test_programs_that_cannot_be_put_on_a_ramp_are_refused(tmp_path):
    model = mlp()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[-1]))
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), first, loader_of(blobs()), other_optimizers=[second],
        train_step=lambda *_: torch.tensor(0.0), config={"progress": False, "run_dir": str(tmp_path)},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"no learning rate can be found: .* one optimizer"):
        trainer.find_lr()


@pytest.mark.parametrize(
    ("optimizer", "lr", "expected"),
    [
        (torch.optim.SGD, 3000.0, ["optimizer.lr_too_high"]),
        (torch.optim.Adam, 3000.0, ["optimizer.lr_too_high"]),
        (torch.optim.SGD, 1e-8, ["optimizer.lr_too_low"]),
        (torch.optim.Adam, 1e-10, ["optimizer.lr_too_low"]),
        (torch.optim.SGD, 0.1, []),
        (torch.optim.SGD, 1e-3, []),
        (torch.optim.Adam, 1e-3, []),
        (torch.optim.Adam, 1e-5, []),
    ],
)
def test_the_configured_rate_is_judged(optimizer, lr, expected, tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    trainer = trainer_of(tmp_path, model, optimizer=optimizer, lr=lr)
    trainer.preflight()
    assert [finding.fault for finding in trainer.report.findings] == expected


def test_a_warm_up_that_begins_at_nothing_is_silent(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 1e-9 + step / 100))
    config = {"progress": False, "run_dir": str(tmp_path), "preflight.checks": ["learning_rate"]}
    trainer = SafeTrainer(
        model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()), scheduler=scheduler, config=config
    )
    trainer.preflight()
    assert trainer.report.findings == []


def test_the_command_line_finds_a_rate_and_trains_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["safe_trainer", "progress=false", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (0, None)
        return capsys.readouterr().out

    told = called("mode=find_lr", "run_dir=found", "seed=0")
    assert (tmp_path / "found" / "lr_finder.csv").exists()
    arguments = ("scheduler=none", "max_epochs=1", "run_dir=trained", "preflight.enabled=false", "seed=0")
    called("optimizer.lr=auto", *arguments)
    rows = [json.loads(line) for line in (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()]
    (rate,) = {row["train/lr"] for row in rows if "train/lr" in row}
    assert f"suggested {rate:.2g}" in told
