import io
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import lr_scheduler as schedules

from safe_trainer.config import parse
from safe_trainer.utils import anomaly, rng
from safe_trainer.utils.anomaly import AnomalyDetector, AnomalyError, raised_by_anomaly_mode

RARELY = {"anomaly_detection": True, "sample_rate": 10**9, "anomaly": {"warmup_steps": 0}}


@pytest.fixture(autouse=True)
def _setting_and_environment(monkeypatch):
    monkeypatch.delenv("DEBUG_ANOMALY", raising=False)
    torch.autograd.set_detect_anomaly(False)
    yield
    assert not torch.is_anomaly_enabled()


def run(detector, steps, after=lambda: None):
    """Numbers of the steps in which autograd's mode was on."""
    on = []
    for number in range(1, steps + 1):
        with detector:
            assert detector.active == torch.is_anomaly_enabled() == bool(detector.reason)
            if torch.is_anomaly_enabled():
                on.append(number)
        after()
    return on


def optimizer(rate=0.1, **options):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate, **options)


# --- the customer's usage ---------------------------------------------------------------------------------------------


def test_the_customers_example_runs_as_it_stands():
    model, data = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), torch.randn(1, 3)
    config = {"anomaly_detection": True}
    with AnomalyDetector(config):
        loss = model(data)
        loss.backward()
        assert torch.is_anomaly_enabled()
    assert model[0].weight.grad is not None


def test_the_article_s_error_comes_through_as_pytorch_words_it():
    w = torch.zeros(2, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="Function 'MulBackward0' returned nan values in its 0th output") as caught,
        AnomalyDetector({"anomaly_detection": True}),
    ):
        (w * torch.tensor([math.inf, 1.0]) * torch.zeros(2)).sum().backward()
    assert raised_by_anomaly_mode(caught.value)
    assert not raised_by_anomaly_mode(RuntimeError("Function is not what you think"))


@pytest.mark.parametrize("rate", [10, 100])
def test_a_detector_built_anew_in_each_step_counts_on(rate):
    config = {"anomaly_detection": True, "sample_rate": rate}
    on = 0
    for _ in range(10 * rate):
        with AnomalyDetector(config):
            on += torch.is_anomaly_enabled()
    assert 10 <= on <= 11  # one a block, and the first step


def test_detectors_side_by_side_or_with_equal_configurations_are_independent():
    config = {"anomaly_detection": True, "sample_rate": 50}
    first, second = AnomalyDetector(config), AnomalyDetector(config)
    assert run(first, 1) == run(second, 1) == [1]
    del first, second
    assert run(AnomalyDetector(dict(config)), 1) == [1]


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"anomaly_detection": True, "sample_rate": 7, "anomaly": {"warmup_steps": 2, "lr_jump": 3.0}},
        {"anomaly_detection": True, "sample_rate": 7, "anomaly.warmup_steps": 2, "anomaly.lr_jump": 3.0},
        OmegaConf.create({"anomaly_detection": True, "sample_rate": 7, "anomaly": {"warmup_steps": 2, "lr_jump": 3.0}}),
        OmegaConf.structured(parse({"anomaly_detection": True, "sample_rate": 7, "anomaly.warmup_steps": 2})),
        parse({"anomaly_detection": True, "sample_rate": 7, "anomaly.warmup_steps": 2}),
    ],
    ids=["nested", "dotted", "DictConfig", "structured", "Config"],
)
def test_all_kinds_of_configuration_are_read(config):
    on = run(AnomalyDetector(config), 700)
    assert on[:2] == [1, 2]
    assert 100 <= len(on) <= 102


def test_defaults():
    assert run(AnomalyDetector({"anomaly_detection": True}), 5) == [1, 2, 3, 4, 5]
    assert run(AnomalyDetector({"anomaly_detection": False}), 5) == []
    assert AnomalyDetector(parse({"anomaly_detection": True})).sample_rate == 100
    schema = {option: getattr(parse({}).anomaly, option) for option in ("warmup_steps", "after_lr_change", "lr_jump")}
    options = AnomalyDetector({"anomaly_detection": True})._options
    assert schema == {option: getattr(options, option) for option in schema}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "anomaly_detection must be given"),
        ({"anomaly_detection": "false"}, "must be true or false"),
        ({"anomaly_detection": True, "sample_rate": 0}, "sample_rate must be a whole number of at least 1"),
        ({"anomaly_detection": True, "sample_rate": True}, "sample_rate"),
        ({"anomaly_detection": True, "sample_rate": 2.5}, "sample_rate"),
        ({"anomaly_detection": True, "anomaly": {"lr_jump": 1.0}}, "lr_jump must be a number greater than 1"),
        ({"anomaly_detection": True, "anomaly": {"warmup_step": 3}}, "did you mean 'warmup_steps'"),
        ({"anomaly_detection": True, "anomaly": {"modules": "head"}}, "a list of names"),
        ({"anomaly_detection": 1, "sample_rate": -1}, r"anomaly_detection .*sample_rate"),
    ],
)
def test_mistakes_are_errors(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        AnomalyDetector(config)


@pytest.mark.parametrize(("setting", "on"), [("true", 9), ("1", 9), ("", 0), ("false", 0)])
def test_the_environment_turns_it_on_at_every_step(monkeypatch, setting, on):
    monkeypatch.setenv("DEBUG_ANOMALY", setting)
    assert len(run(AnomalyDetector({"anomaly_detection": False, "sample_rate": 100}), 9)) == on


def test_nonsense_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("DEBUG_ANOMALY", "maybe")
    with pytest.raises(ValueError, match="DEBUG_ANOMALY"):
        AnomalyDetector({"anomaly_detection": False})


# --- the setting found on entry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_the_setting_found_on_entry_comes_back(before, enabled, raises):
    detector = AnomalyDetector({"anomaly_detection": enabled})
    with torch.autograd.set_detect_anomaly(*before):
        try:
            with detector as itself:
                assert itself is detector
                with detector, detector:
                    assert torch.is_anomaly_enabled() == (enabled or before[0])
                assert torch.is_anomaly_enabled() == (enabled or before[0])
                if raises:
                    raise KeyError
        except KeyError:
            pass
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == before
    assert detector.step == 1
    assert not detector.active
    torch.autograd.set_detect_anomaly(False)


def test_check_nan_can_be_off():
    detector = AnomalyDetector({"anomaly_detection": True}, check_nan=False)
    w = torch.zeros(1, requires_grad=True)
    with detector:
        (w * math.inf * torch.zeros(1)).sum().backward()
        assert torch.is_anomaly_enabled()
    assert w.grad.isnan().all()


def test_suspended_entries_are_no_steps():
    detector = AnomalyDetector({"anomaly_detection": True})
    with detector.suspended(), detector:
        assert not torch.is_anomaly_enabled()
    assert detector.step == 0
    assert run(detector, 2) == [1, 2]


# --- which steps ------------------------------------------------------------------------------------------------------


def test_one_step_in_each_block_is_drawn_and_global_generators_stay_untouched():
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    on = run(AnomalyDetector({**RARELY, "sample_rate": 20}), 2000)
    assert (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()) == before
    assert [(number - 1) // 20 for number in on] == list(range(100))
    places = [(number - 1) % 20 for number in on]
    assert len(set(places)) >= 18  # all places are drawn: 100 draws leave out 0.1 of 20 on average


def test_the_draw_depends_on_seed_and_block_alone():
    ranks = [run(AnomalyDetector({**RARELY, "sample_rate": 20, "seed": 4}), 400) for _ in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0] != run(AnomalyDetector({**RARELY, "sample_rate": 20, "seed": 5}), 400)


def test_reasons_and_due():
    used = optimizer()
    detector = AnomalyDetector({**RARELY, "sample_rate": 1000, "anomaly": {"warmup_steps": 2}}, used)
    reasons = []
    for step in range(1, 1001):
        if step == 10:
            used.param_groups[0]["lr"] = 0.01
        assert detector.due() == detector.due()
        announced = detector.due()
        with detector:
            assert detector.reason == announced
        reasons.append(announced)
    assert reasons[:3] == ["warm-up", "warm-up", ""]
    assert reasons[9:13] == ["learning rate jumped from 0.1 to 0.01"] * 3 + [""]
    assert reasons.count("drawn") == 1
    assert detector.active_steps == len(detector.windows) == 6
    assert AnomalyDetector({"anomaly_detection": True}).due() == "every step"


def test_the_list_of_windows_is_bounded():
    detector = AnomalyDetector({"anomaly_detection": True})
    run(detector, 1200)
    assert detector.windows == list(range(201, 1201))
    assert detector.active_steps == 1200


def test_a_resumed_detector_goes_on_as_if_never_interrupted():
    def walk(detector, used, steps):
        windows = []
        for step in steps:
            used.param_groups[0]["lr"] = 0.001 if step >= 30 else 0.1 * 0.99**step
            with detector:
                windows.append((step, detector.reason))
        return windows

    config = {"anomaly_detection": True, "sample_rate": 15}
    whole = walk(AnomalyDetector(config, used := optimizer()), used, range(100))
    for cut in (1, 29, 30, 31, 32, 40):
        first = AnomalyDetector(dict(config), used := optimizer())
        start = walk(first, used, range(cut))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = AnomalyDetector(dict(config), used := optimizer(7.0))
        second.load_state_dict(torch.load(file, weights_only=True))
        assert start + walk(second, used, range(cut, 100)) == whole
        assert second.step == 100
    with pytest.raises(ValueError, match="must have the keys"):
        AnomalyDetector(config).load_state_dict({"step": 3})


# --- jumps of the learning rate ---------------------------------------------------------------------------------------


def jumps(used, scheduler, steps, beat=1):
    """Steps at which a window opened."""
    detector, found, step = AnomalyDetector(RARELY, used), [], 0
    for step in range(1, steps + 1):
        with detector:
            if detector.active and (not found or step > found[-1] + 2):
                found.append(step)
        used.step()
        if step % beat == 0:
            scheduler.step()
    return found


def linear_warmup(first, length):
    return lambda step: max(first, min(1.0, step / length))


SMOOTH = {
    "cosine": lambda o, n: schedules.CosineAnnealingLR(o, n),
    "cosine, there and back": lambda o, n: schedules.CosineAnnealingLR(o, n // 3),
    "cosine to a floor": lambda o, n: schedules.CosineAnnealingLR(o, n, eta_min=1e-7),
    "one cycle": lambda o, n: schedules.OneCycleLR(o, 0.1, total_steps=n + 1),
    "one cycle, linear": lambda o, n: schedules.OneCycleLR(o, 0.1, total_steps=n + 1, anneal_strategy="linear"),
    "one cycle, three phases": lambda o, n: schedules.OneCycleLR(o, 0.1, total_steps=n + 1, three_phase=True),
    "exponential": lambda o, n: schedules.ExponentialLR(o, 1e-3 ** (1 / n)),
    "linear to nothing": lambda o, n: schedules.LinearLR(o, 1.0, 0.0, n),
    "linear to next to nothing": lambda o, n: schedules.LinearLR(o, 1.0, 1e-6, n),
    "polynomial": lambda o, n: schedules.PolynomialLR(o, n, power=2.0),
    "polynomial, fourth power": lambda o, n: schedules.PolynomialLR(o, n, power=4.0),
    "linear warm-up": lambda o, n: schedules.LinearLR(o, 1 / 3, 1.0, n),
    "linear warm-up from little": lambda o, n: schedules.LinearLR(o, 1e-3, 1.0, n),
    "linear warm-up from next to nothing": lambda o, n: schedules.LinearLR(o, 1e-8, 1.0, n),
    "linear warm-up from 0": lambda o, n: schedules.LambdaLR(o, linear_warmup(0.0, n)),
    "warm-up 1/n, 2/n, 3/n": lambda o, n: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 7)),
    "inverse root": lambda o, n: schedules.LambdaLR(o, lambda s: min((s + 1) / 9, 3 / (s + 1) ** 0.5)),
    "warm-up, then cosine": lambda o, n: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 1e-4, 1.0, n // 4), schedules.CosineAnnealingLR(o, n - n // 4)], [n // 4]
    ),
    "triangles": lambda o, n: schedules.CyclicLR(o, 1e-3, 0.1, step_size_up=max(n // 6, 1)),
    "halved": lambda o, n: schedules.StepLR(o, max(n // 5, 1), 0.5),
    "constant": lambda o, n: schedules.ConstantLR(o, 1.0, 1),
}


@pytest.mark.parametrize("beat", [1, 5], ids=["by step", "by epoch"])
@pytest.mark.parametrize("length", [12, 100])
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_schedules_open_no_window(name, length, beat):
    used = optimizer(0.1, momentum=0.9)
    assert jumps(used, SMOOTH[name](used, length), length * beat, beat) == []


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: schedules.StepLR(o, 20, 0.1), [21, 41, 61, 81]),
        (lambda o: schedules.MultiStepLR(o, [30, 60], 0.1), [31, 61]),
        (lambda o: schedules.ConstantLR(o, 0.1, 40), [41]),
        (lambda o: schedules.CosineAnnealingWarmRestarts(o, 25), [26, 51, 76]),
        (
            lambda o: schedules.SequentialLR(
                o, [schedules.LinearLR(o, 1e-4, 1.0, 10), schedules.StepLR(o, 30, 0.1)], [10]
            ),
            [41, 71],
        ),
    ],
    ids=["steps", "milestones", "constant warm-up", "warm restarts", "warm-up, then steps"],
)
def test_jumps_of_schedules_open_windows(make, expected):
    used = optimizer(0.1)
    assert jumps(used, make(used), 100) == expected


@pytest.mark.parametrize(
    ("before", "after", "jump"),
    [(0.1, 0.01, True), (0.1, 0.04, True), (0.1, 0.05, False), (0.1, 0.2, False), (0.1, 0.21, True), (0.1, 0.0, False)],
)
def test_a_change_by_hand(before, after, jump):
    used = optimizer(before)
    detector = AnomalyDetector(RARELY, used)
    assert run(detector, 10) == []
    used.param_groups[0]["lr"] = after
    assert run(detector, 10) == ([1, 2, 3] if jump else [])


def test_a_frozen_group_that_wakes_up_is_a_jump():
    used = optimizer(0.0)
    detector = AnomalyDetector(RARELY, used)
    assert run(detector, 10) == []
    used.param_groups[0]["lr"] = 0.1
    assert run(detector, 10) == [1, 2, 3]


def test_a_warm_up_by_hand_without_a_scheduler_opens_no_window():
    used = optimizer(0.1)
    detector = AnomalyDetector(RARELY, used)
    for step in range(20):
        used.param_groups[0]["lr"] = 1e-6 + min(1.0, step / 10) * 0.1
        with detector:
            assert not detector.active


def test_any_group_and_any_optimizer_counts():
    first, second = optimizer(0.1), optimizer(0.2)
    second.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 1.0})
    detector = AnomalyDetector(RARELY, [first, second])
    run(detector, 3)
    second.param_groups[1]["lr"] = 9.0
    first.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # moves the others along: a new group is no jump
    second.param_groups[1]["lr"] = 1.0
    assert run(detector, 3) in ([], [1, 2, 3])
    second.param_groups[1]["lr"] = 9.0
    assert run(detector, 4) == [1, 2, 3]
    assert detector.reason == ""


def test_a_rate_that_is_a_tensor_is_read_on_the_cpu_only():
    used = optimizer(torch.tensor(0.1))
    detector = AnomalyDetector(RARELY, used)
    assert run(detector, 3) == []
    used.param_groups[0]["lr"].fill_(0.001)
    assert run(detector, 3) == [1, 2, 3]
    used.param_groups[0]["lr"] = torch.ones((), device="meta")  # stands for a GPU: reading it would raise
    assert run(detector, 3) == []


# --- chosen modules ---------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A good and a bad branch from one input, a weight that both share, and a residual path."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.good = nn.Linear(4, 4)
        self.bad = RootOfZero(self.good.weight)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.good(x) + self.bad(x, scale=x)).sum()


class RootOfZero(nn.Module):
    """Finite forward; the root's backward at 0 is infinite, and 0 * inf is NaN."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x, scale):
        return torch.sqrt(scale * 0 * (x @ self.weight))


MODULES = {"anomaly_detection": True, "anomaly": {"modules": ["stem", "good", "head"]}}


def backward(detector, model):
    with detector:
        model(torch.rand(2, 4) + 1).backward()


def test_innocent_modules_are_not_blamed_for_a_neighbour():
    torch.manual_seed(0)
    model = Branches()
    backward(AnomalyDetector(MODULES, model=model), model)  # the NaN passes through stem, and through good's weight
    assert model.good.weight.grad.isnan().any()


def test_the_guilty_module_is_named_with_line_and_receiver():
    torch.manual_seed(0)
    model = Branches()
    detector = AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["good", "bad"]}}, model=model)
    with pytest.raises(AnomalyError) as caught:
        backward(detector, model)
    text = str(caught.value)
    assert "module bad got a finite gradient and gives a non-finite one to its" in text
    assert "SqrtBackward0" in text
    line = next(
        number
        for number, code in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "torch.sqrt(scale * 0" in code
    )
    assert f"test_anomaly.py:{line}" in text
    assert raised_by_anomaly_mode(caught.value)


@pytest.mark.parametrize("receiver", ["parameter weight", "input 0", "input scale"])
def test_the_receiver_is_named(receiver):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x, scale):
            chosen = {"parameter weight": self.weight, "input 0": x, "input scale": scale}[receiver]
            return torch.sqrt(chosen * 0).sum()

    model = nn.ModuleDict({"part": Bad()})
    inputs = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 2
    detector = AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["part"]}}, model=model)
    with pytest.raises(AnomalyError, match=f"to its {receiver.replace('weight', 'part.weight')}: 3 of 3"), detector:
        model["part"](inputs[0], scale=inputs[1]).backward()


def test_an_infinity_counts_which_the_mode_alone_lets_pass():
    model = nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(0)

    def loss():
        return torch.sqrt(weight).sum()

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self):
            return loss()

    with AnomalyDetector({"anomaly_detection": True}):
        loss().backward()  # silent
    model.add_module("root", Root())
    with (
        pytest.raises(AnomalyError, match="module root"),
        AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["root"]}}, model=model),
    ):
        model.root().backward()


def test_no_hook_outlives_a_window_on_modules_or_on_a_living_graph():
    torch.manual_seed(0)
    model = Branches()
    detector = AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["bad"]}}, model=model)
    with detector:
        loss = model(torch.rand(2, 4) + 1)
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    loss.backward()  # outside the window: nobody judges


def test_modules_limit_the_check_and_need_no_full_backward_hooks():
    w = torch.zeros(1, requires_grad=True)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
    detector = AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["0", "1", "2"]}}, model=model)
    with detector:
        (model(torch.randn(2, 1, 3, 3)).sum() + (w * math.inf * torch.zeros(1)).sum()).backward()
    assert w.grad.isnan().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules(reentrant):
    torch.manual_seed(0)
    model = Branches()
    detector = AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["bad", "good"]}}, model=model)
    x = (torch.rand(2, 4) + 1).requires_grad_()

    def both(x):
        return model.good(x) + model.bad(x, x)

    with pytest.raises(AnomalyError, match="module bad"), detector:
        torch.utils.checkpoint.checkpoint(both, x, use_reentrant=reentrant).sum().backward()


def test_unknown_modules_and_a_missing_model_are_errors():
    with pytest.raises(ValueError, match="'haed' is no submodule of the model; did you mean 'head'"):
        AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["haed"]}}, model=Branches())
    with pytest.raises(ValueError, match="needs the model"):
        AnomalyDetector(MODULES)


def test_windows_change_no_number():
    def train(config):
        rng.seed_everything(3)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )
        model = nn.ModuleDict({"body": model, "q": nn.Linear(8, 8), "k": nn.Linear(8, 8)})
        used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        detector = AnomalyDetector(config, used, model)
        for _ in range(20):
            x = torch.randn(16, 4)
            with detector:
                h = model["body"](x)
                loss = (model["q"](h) * model["k"](h) + h).square().mean()
                used.zero_grad()
                loss.backward()
            used.step()
        return [*(value.tolist() for value in model.state_dict().values()), torch.get_rng_state().tolist()]

    plain = train({"anomaly_detection": False})
    for extra in ({"sample_rate": 1}, {"sample_rate": 5}, {"anomaly": {"modules": ["body", "body.2", "q", "k"]}}):
        assert train({"anomaly_detection": True, **extra}) == plain


def test_the_two_import_names_are_one_class():
    assert anomaly.AnomalyDetector is AnomalyDetector
