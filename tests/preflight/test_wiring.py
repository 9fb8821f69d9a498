"""The wiring of broken programs and of their mended twins."""

import pytest
import torch
from programs import SmallCNN, blobs, loader_of, mlp, pictures
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def numbers(samples=64, features=6, column=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    targets = inputs[:, 0] - inputs[:, 1]
    return TensorDataset(inputs, targets.unsqueeze(1) if column else targets)


class Parts(nn.Module):
    """Layers held as `hold` says, then used one after the other."""

    def __init__(self, hold):
        super().__init__()
        self.layers = hold([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return self.head(inputs)


@pytest.mark.parametrize(
    ("make", "data", "where"),
    [
        (lambda end: nn.Sequential(mlp(), end), lambda: blobs(), "1"),
        (lambda end: nn.Sequential(SmallCNN(), end), lambda: pictures(), "1"),
        (lambda end: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3), end), lambda: blobs(seed=3), "3"),
    ],
)
def test_a_softmax_before_cross_entropy(make, data, where, alarms):
    for end, expected in ((nn.Softmax(dim=1), [("loss.double_softmax", where)]), (nn.Identity(), [])):
        model = make(end)
        assert alarms("wiring", model, nn.CrossEntropyLoss(), sgd(model), loader_of(data()))[0] == expected


@pytest.mark.parametrize("column", [True, False])
def test_a_sigmoid_before_a_loss_that_has_one(column, alarms):
    data = numbers()
    labels = (data.tensors[1] > 0).float()
    data = TensorDataset(data.tensors[0], labels.unsqueeze(1) if column else labels)
    for end, loss, expected in (
        (nn.Sigmoid(), nn.BCEWithLogitsLoss(), ["loss.double_softmax"]),
        (nn.Sigmoid(), nn.BCELoss(), []),
        (nn.Identity(), nn.BCEWithLogitsLoss(), []),
    ):
        model = nn.Sequential(nn.Linear(6, 1), end, nn.Identity() if column else nn.Flatten(0))
        assert [name for name, _ in alarms("wiring", model, loss, sgd(model), loader_of(data))[0]] == expected


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.L1Loss(), lambda output, target: (output - target).pow(2).mean(), nn.SmoothL1Loss()],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_broadcasts(loss, alarms):
    for column, expected in ((False, ["loss.broadcast"]), (True, [])):
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        found, _ = alarms("wiring", model, loss, sgd(model), loader_of(numbers(column=column)))
        assert [name for name, _ in found] == expected


def test_broadcasting_on_purpose_is_silent(alarms):
    """A weight for each sample, distances of all pairs, quantiles beside each other."""
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def pinball(output, target):
        error = target.unsqueeze(1) - output
        return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    def pairs(output, target):
        distances = (output.unsqueeze(0) - output.unsqueeze(1)).square().sum(-1)
        same = (target.unsqueeze(0) - target.unsqueeze(1)).abs()
        return (distances - same).square().mean()

    for loss in (pinball, pairs):
        model = nn.Linear(6, 3)
        assert alarms("wiring", model, loss, sgd(model), loader_of(numbers()))[0] == []


@pytest.mark.parametrize("hold", [list, lambda layers: {"a": layers[0], "b": layers[1]}.values(), tuple])
def test_layers_that_are_not_registered(hold, alarms):
    if hold not in (list, tuple):
        model = Parts(lambda layers: layers)
        model.layers = dict(enumerate(model.layers))
        model.forward = lambda inputs: model.head(model.layers[1](model.layers[0](inputs).relu()).relu())
    else:
        model = Parts(hold)
    found, _ = alarms("wiring", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
    assert found == [("model.unregistered_submodule", "layers")]
    mended = Parts(nn.ModuleList)
    assert alarms("wiring", mended, nn.CrossEntropyLoss(), sgd(mended), loader_of(blobs()))[0] == []


def test_a_tensor_in_place_of_a_parameter(alarms):
    class Scaled(nn.Module):
        def __init__(self, as_parameter):
            super().__init__()
            scale = torch.ones(8)
            self.scale = nn.Parameter(scale) if as_parameter else scale.requires_grad_()
            self.head = nn.Linear(8, 3)

        def forward(self, inputs):
            return self.head(inputs * self.scale)

    for as_parameter, expected in ((False, [("model.unregistered_submodule", "scale")]), (True, [])):
        model = Scaled(as_parameter)
        assert alarms("wiring", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))[0] == expected


def test_inputs_that_want_gradients_and_parameters_of_a_loss_are_silent(alarms):
    class Centres(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 3))

        def forward(self, output, target):
            return functional.cross_entropy(output, target) + (output - self.centres[target]).square().mean()

    model, loss = nn.Linear(8, 3), Centres()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    assert alarms("wiring", model, loss, optimizer, loader_of(blobs()))[0] == []


@pytest.mark.parametrize(
    "cut",
    [
        lambda loss: torch.tensor(loss.item(), requires_grad=True),
        lambda loss: loss.detach().requires_grad_(),
        lambda loss: torch.as_tensor(float(loss)).clone().requires_grad_(),
    ],
)
def test_a_loss_that_is_cut_off(cut, alarms):
    model = nn.Linear(8, 3)
    found, _ = alarms("wiring", model, lambda o, t: cut(functional.cross_entropy(o, t)), sgd(model), loader_of(blobs()))
    assert found == [("gradient.missing", "loss_fn")]


@pytest.mark.parametrize(
    ("broken", "mended"),
    [
        (lambda o, t: functional.nll_loss(o.softmax(1), t), lambda o, t: functional.nll_loss(o.log_softmax(1), t)),
        (lambda o, t: functional.nll_loss(o, t), lambda o, t: functional.cross_entropy(o, t)),
        (
            lambda o, t: functional.kl_div(o.softmax(1), functional.one_hot(t, 3).float(), reduction="batchmean"),
            lambda o, t: functional.kl_div(o.log_softmax(1), functional.one_hot(t, 3).float(), reduction="batchmean"),
        ),
        (
            lambda o, t: functional.soft_margin_loss(o[:, 0], (t == 0).float()),
            lambda o, t: functional.soft_margin_loss(o[:, 0], 2 * (t == 0).float() - 1),
        ),
        (
            lambda o, t: functional.hinge_embedding_loss(o[:, 0], 2 * (t == 0).float() - 1),
            lambda o, t: functional.hinge_embedding_loss(o[:, 0].square(), 2 * (t == 0).float() - 1),
        ),
    ],
)
def test_a_loss_that_is_fed_something_else(broken, mended, alarms):
    for loss, expected in ((broken, ["loss.input_domain"]), (mended, [])):
        torch.manual_seed(0)
        model = mlp()
        found, _ = alarms("wiring", model, loss, sgd(model), loader_of(blobs()))
        assert [name for name, _ in found] == expected


def test_a_relu_on_the_scores_and_a_softmax_of_one(alarms):
    class Attention(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.score, self.head, self.dim = nn.Linear(4, 1), nn.Linear(4, 3), dim

        def forward(self, inputs):
            places = inputs.view(len(inputs), 2, 4)
            weights = functional.softmax(self.score(places), dim=self.dim)
            return self.head((weights * places).sum(1))

    for dim, expected in ((2, ["activation.collapsed"]), (1, [])):
        model = Attention(dim)
        found, _ = alarms("wiring", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
        assert [name for name, _ in found] == expected
    for bias, expected in ((-50.0, ["activation.dead"]), (5.0, [])):
        model = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
        with torch.no_grad():
            model[0].bias[1] = bias
            model[0].bias[0] = 5.0
        found, _ = alarms("wiring", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
        assert [name for name, _ in found] == expected


def test_a_step_of_the_users_own_is_traced_too(alarms):
    def step(model, loss_fn, optimizer, batch):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]).softmax(1), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    model = mlp()
    found, _ = alarms("wiring", model, None, sgd(model), loader_of(blobs()), train_step=step)
    assert [name for name, _ in found] == ["loss.double_softmax"]


class Routed(nn.Module):
    """Two experts, and a router whose choice has no gradient unless it is soft."""

    def __init__(self, how):
        super().__init__()
        self.how, self.router = how, nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, inputs):
        scores = self.router(inputs)
        if self.how == "argmax":
            gate = functional.one_hot(scores.argmax(1), 2).float()
        elif self.how == "rounded":
            gate = scores.softmax(1).round()
        elif self.how == "straight":
            soft = scores.softmax(1)
            gate = soft + (functional.one_hot(soft.argmax(1), 2) - soft).detach()
        else:
            gate = scores.softmax(1)
        return sum(gate[:, k : k + 1] * expert(inputs) for k, expert in enumerate(self.experts))


@pytest.mark.parametrize(("how", "wrong"), [("argmax", True), ("rounded", True), ("straight", False), ("soft", False)])
def test_a_choice_that_has_no_gradient(how, wrong, alarms):
    model = Routed(how)
    found, _ = alarms("wiring", model, nn.CrossEntropyLoss(), sgd(model), loader_of(blobs()))
    assert found == ([("gradient.missing", "router")] if wrong else [])


class Detached(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.head = how, nn.Linear(8, 16), nn.Linear(16, 3)
        self.unused = nn.Linear(8, 3)
        if how == "frozen":
            self.body.requires_grad_(False)

    def forward(self, inputs):
        if self.how == "average":  # moved by hand, as the teacher of a student is
            with torch.no_grad():
                self.body.weight.mul_(0.999)
        hidden = self.body(inputs)
        hidden = hidden if self.how == "plain" else hidden.detach()
        return self.head(hidden.relu())


@pytest.mark.parametrize("how", ["left in", "plain", "frozen", "average", "not held", "evaluation"])
def test_a_detach_that_was_left_in(how, alarms):
    model = Detached(how)
    optimizer = torch.optim.SGD(model.head.parameters() if how == "not held" else model.parameters(), lr=0.1)
    if how == "evaluation":
        model.body.eval()
    found, _ = alarms("wiring", model, nn.CrossEntropyLoss(), optimizer, loader_of(blobs()))
    missing = [where for fault, where in found if fault == "gradient.missing"]
    assert missing == (["body"] if how == "left in" else [])
