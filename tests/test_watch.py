"""The fuse around a loop of one's own: a healthy loop keeps every bit, a bad step never reaches the weights."""

import copy
import logging
import math

import pytest
import torch
from programs import SmallCNN, blobs, equal, fingerprint, loader_of, mlp, pictures
from torch import nn

from safe_trainer import ConfigError, SafetyError, watch

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


class SmallTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, pictures):
        return self.head(self.encoder(self.embedding(pictures.squeeze(1))).mean(1))


def steps_of(form, model, loss_fn, optimizer, loader, epochs=10, config=None):
    """The same loop without a watch, in its with form and in its wrapped form."""
    losses = []

    def train_step(batch):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    if form == "bare":
        losses = [train_step(batch).item() for _ in range(epochs) for batch in loader]
        return losses, None
    with watch(model, optimizer, loss_fn if form == "with" else None, config) as guard:
        watched = guard.wrap(train_step) if form == "wrap" else None
        for _ in range(epochs):
            for batch in loader:
                if watched is not None:
                    losses.append(watched(batch).item())
                    continue
                with guard.step(batch):
                    optimizer.zero_grad()
                    loss = loss_fn(model(batch[0]), batch[1])
                    loss.backward()
                    guard.loss(loss)
                    optimizer.step()
                losses.append(loss.item())
    return losses, guard


@pytest.mark.parametrize("form", ["with", "wrap"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", [SmallCNN, SmallTransformer])
def test_a_healthy_loop_keeps_every_bit(network, optimizer, form):
    outcomes = []
    for how in ("bare", form):
        torch.manual_seed(3)
        model = network()
        moved = OPTIMIZERS[optimizer](model.parameters())
        config = {"monitor.every": 10, "anomaly_detection": True, "sample_rate": 7}
        losses, guard = steps_of(how, model, nn.CrossEntropyLoss(), moved, loader_of(pictures()), config=config)
        outcomes.append((losses, fingerprint(model, moved), torch.get_rng_state()))
    assert outcomes[0][0] == outcomes[1][0]
    assert equal(outcomes[0][1], outcomes[1][1])
    assert torch.equal(outcomes[0][2], outcomes[1][2])
    assert guard.report.findings == []
    assert guard.report.history["loss"] == outcomes[1][0]
    assert len(guard.monitors.history) > 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not moved._optimizer_step_post_hooks
    assert not moved._optimizer_step_pre_hooks


def poisoned(bad, count=6):
    data = blobs(16 * count).tensors
    made = [[tensor[16 * place : 16 * (place + 1)].clone() for tensor in data] for place in range(count)]
    for place in bad:
        made[place][0][3, 2] = math.nan
    return made


@pytest.mark.parametrize("form", ["with", "wrap"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_step_is_as_if_it_had_never_been(form, policy):
    outcomes = []
    for bad in ((), (3,)):
        torch.manual_seed(7)
        model = mlp(dropout=0.0)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        batches = [batch for place, batch in enumerate(poisoned(bad)) if bad or place != 3]
        config = {"guard.nonfinite": policy, "on_fault": "report"}
        _, guard = steps_of(form, model, nn.CrossEntropyLoss(), optimizer, batches, epochs=1, config=config)
        outcomes.append(fingerprint(model, optimizer))
    assert equal(*outcomes)
    (finding,) = guard.report.findings
    assert (finding.fault, finding.where, finding.step) == ("data.nonfinite", "batch[0]", 4)
    assert finding.severity == ("error" if policy == "stop" else "warning")


@pytest.mark.parametrize("form", ["with", "wrap"])
def test_the_run_stops_with_its_report(form, tmp_path):
    torch.manual_seed(7)
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    config = {"run_dir": str(tmp_path / "mine")}
    with pytest.raises(SafetyError) as caught:
        steps_of(form, model, nn.CrossEntropyLoss(), optimizer, poisoned((2,)), epochs=1, config=config)
    assert caught.value.report.findings[0].fault == "data.nonfinite"
    assert caught.value.report.history["step"] == [1, 2]
    assert list((tmp_path / "mine" / "nonfinite").iterdir())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_every_step_bad_ends_the_run_under_any_policy():
    model = mlp()
    config = {"guard.nonfinite": "skip", "guard.max_skips": 3}
    with pytest.raises(SafetyError, match=r"data\.nonfinite") as caught:
        steps_of("wrap", model, nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](model.parameters()),
                 poisoned(range(6)), epochs=1, config=config)  # fmt: skip
    assert not caught.value.report.ok


class LogOfNothing(nn.Module):
    def forward(self, inputs):
        return torch.log(torch.relu(inputs) * 0)


@pytest.mark.parametrize("how", ["no loss_fn", "other step"])
def test_without_a_replay_the_report_says_so_and_names_the_module(how):
    model = nn.Sequential(nn.Linear(4, 4), LogOfNothing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = None if how == "no loss_fn" else lambda output, target: model[0].weight.sum()
    with watch(model, optimizer, loss_fn, {"on_fault": "report"}) as guard, guard.step((torch.randn(3, 4), None)):
        loss = model(torch.randn(3, 4)).sum()
        loss.backward()
        guard.loss(loss)
        optimizer.step()
    (finding,) = guard.report.findings
    assert finding.where == "1"
    assert ("no replay" in finding.cause) == (how == "no loss_fn")
    assert "guard.wrap" in finding.remedy
    assert torch.isfinite(model[0].weight).all()


def test_the_wrapped_step_names_operation_and_line():
    model = nn.Sequential(nn.Linear(4, 4), LogOfNothing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, config={"on_fault": "report"}) as guard:

        @guard.wrap
        def train_step(inputs, scale):
            optimizer.zero_grad()
            loss = (model(inputs) * scale).sum()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        result = train_step(torch.randn(3, 4), 2.0)
    assert torch.isinf(result["loss"])
    (finding,) = guard.report.findings
    assert (finding.fault, finding.where) == ("loss.log_of_zero", "1")
    assert finding.source.startswith("test_watch.py:")


def test_a_loop_without_zero_grad_is_stopped():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = watch(model, optimizer)

    def loop():
        for batch in loader_of(blobs(16 * 20)):
            with guard.step(batch):
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()

    with pytest.raises(SafetyError, match=r"gradient\.accumulating"), guard:
        loop()
    assert guard.number == 10


def test_an_evaluation_between_steps_in_training_mode_is_told(caplog):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = list(loader_of(blobs(16 * 6)))

    def validate():
        with torch.no_grad():
            return sum(nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in batches)

    with caplog.at_level(logging.WARNING), watch(model, optimizer) as guard:
        for _ in range(3):
            for batch in batches:
                with guard.step(batch):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                    optimizer.step()
            validate()
    (finding,) = guard.report.findings
    assert (finding.fault, finding.where, finding.severity) == ("model.eval_missing", "validate", "warning")
    assert "model.eval_missing" in caplog.text


def test_a_rollback_takes_back_the_weights_and_lowers_the_rate():
    torch.manual_seed(7)
    model = mlp(dropout=0.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    config = {"guard.nonfinite": "rollback", "guard.snapshot_every": 2}
    _, guard = steps_of("wrap", model, nn.CrossEntropyLoss(), optimizer, poisoned((4,)), epochs=1, config=config)
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert guard.report.ok
    assert guard.guard.rollbacks == 1


def test_an_exception_of_the_loop_goes_through_with_its_place():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ZeroDivisionError) as caught, watch(model, optimizer) as guard, guard.step(torch.ones(2, 8)):
        1 / 0  # noqa: B018
    assert "training step 1" in caught.value.__notes__[0]
    assert not model._forward_hooks


def test_what_does_not_fit_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        watch("model", "optimizer", config={})
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="guard"):
        watch(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()), config={"guard.nonfinte": "skip"})
    guard = watch(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match="with watch"), guard.step(torch.ones(2, 2)):
        pass


def test_a_copy_of_a_watched_model_takes_nothing_along(tmp_path):
    model = mlp()
    with watch(model, torch.optim.SGD(model.parameters())):
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (twin, loaded):
        assert "safe_trainer" not in repr(list(other._forward_hooks.values()))
        assert equal(fingerprint(other), fingerprint(model))
        assert other.eval()(torch.ones(2, 8)).shape == (2, 3)
