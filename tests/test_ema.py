"""The average of the weights for models that a plain deepcopy or a plain lerp cannot take."""

import pytest
import torch
from programs import blobs, equal, fingerprint, loader_of
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

from safe_trainer import SafeTrainer
from safe_trainer.ema import Average


class Counting(nn.Module):
    """A parameter of whole numbers, and a result that is kept from one forward to the next."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.order = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, inputs):
        self.kept = {"last": [self.linear(inputs)]}
        return self.kept["last"][0][:, self.order]


MODELS = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)),
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 3)),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 3)),
    "whole_numbers": Counting,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", MODELS)
def test_it_is_kept_evaluated_and_resumed(name, tmp_path):
    def train(folder, steps, **options):
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
        config = {"run_dir": str(tmp_path / folder), "progress": False, "max_steps": steps, "ema_decay": 0.9, **options}
        loader = loader_of(blobs(), shuffle=False)
        trainer = SafeTrainer(model, nn.CrossEntropyLoss(), optimizer, loader, loader, config=config)
        report = trainer.run()
        return fingerprint(model, optimizer), list(trainer.average.module.state_dict().values()), report.metrics

    whole = train("whole", 14)
    train("parts", 8)
    parts = train("parts", 14, resume="last")
    assert equal(whole[0], parts[0])
    assert equal(whole[1], parts[1])
    assert whole[2] == parts[2]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_that_of_a_lazy_model_begins_at_its_first_step():
    model = nn.LazyLinear(3)
    average = Average(model, 0.5)
    model(torch.randn(2, 8))
    average.update(model)
    assert torch.equal(average.module.weight, model.weight)
    assert average.module.weight is not model.weight
    assert not average.module.weight.requires_grad
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    average.update(model)
    torch.testing.assert_close(average.module.weight, before + 1 - 0.25)  # the second decay is 3 / 12


def test_whole_numbers_are_copied():
    model = Counting()
    average = Average(model, 0.5)
    model.order.copy_(torch.tensor([2, 1, 0]))
    average.update(model)
    assert average.module.order.tolist() == [2, 1, 0]
