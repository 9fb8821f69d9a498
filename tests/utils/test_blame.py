import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safe_trainer.utils import rng
from safe_trainer.utils.anomaly import AnomalyError, raised_by_anomaly_mode, validate_module


class Scale(nn.Module):
    """One over the mean, as in the customer's article: infinite for an input of zeros, and its gradient, too."""

    def forward(self, x):
        return x / x.mean()


class Root(nn.Module):
    """Finite forward at 0; its backward there is not."""

    def forward(self, x):
        return torch.sqrt(x * x)


class Mended(nn.Module):
    def forward(self, x):
        return torch.sqrt(x * x + 1e-6)


def model_with(part):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), part, nn.Dropout(0.5), nn.Linear(4, 2)
    )


def loader(**options):
    return DataLoader(TensorDataset(torch.randn(12, 3), torch.arange(12) % 2), batch_size=4, **options)


def test_a_good_module_passes_and_the_batches_are_counted():
    assert validate_module(model_with(Mended()), loader(), nn.functional.cross_entropy) == 3
    assert validate_module(model_with(Mended()), loader()) == 3
    assert validate_module(nn.Linear(3, 1), torch.randn(5, 3)) == 1
    assert validate_module(nn.Linear(3, 1), (torch.randn(5, 3), torch.randn(5, 1)), nn.functional.mse_loss) == 1
    assert validate_module(nn.Linear(3, 1), {"input": torch.randn(5, 3)}) == 1


def test_the_article_s_check_without_gradients_passes_what_this_one_catches():
    model, batches = model_with(Root()), [torch.randn(4, 3)]
    with torch.autograd.set_detect_anomaly(True), torch.no_grad():
        assert model(batches[0]).isfinite().all()
    with pytest.raises(AnomalyError, match="batch 0: Function 'SqrtBackward0' returned nan") as caught:
        validate_module(model, batches)
    assert "a gradient went bad in module 3: it became so in SqrtBackward0, whose forward is at" in str(caught.value)
    assert "test_blame.py:" in str(caught.value)
    assert raised_by_anomaly_mode(caught.value.__cause__)


def test_an_infinite_loss_is_an_error_with_the_first_module():
    batches = [torch.ones(2, 3), torch.zeros(2, 3)]
    with pytest.raises(AnomalyError, match="batch 1: the loss is nan") as caught:
        validate_module(nn.Sequential(Scale(), nn.Linear(3, 1)), batches)
    assert "module 0 is the first with finite inputs and a non-finite output" in str(caught.value)


def test_an_infinite_gradient_is_an_error_though_the_mode_is_silent():
    class Infinite(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return x + torch.sqrt(self.weight)

    with pytest.raises(AnomalyError, match=r"gives a non-finite one to its parameter 0\.weight: 2 of 2"):
        validate_module(nn.Sequential(Infinite()), [torch.ones(1, 2)])


def test_a_loss_function_at_fault_is_not_pinned_on_a_module():
    def loss_fn(output, _):
        return torch.sqrt((output * 0).square()).sum()

    with pytest.raises(AnomalyError, match="PowBackward0") as caught:
        validate_module(nn.Linear(3, 1), [torch.ones(1, 3)], loss_fn)
    assert "module" not in str(caught.value)


def test_errors_of_the_model_carry_the_batch():
    with pytest.raises(AnomalyError, match="batch 1: mat1 and mat2 shapes cannot be multiplied") as caught:
        validate_module(nn.Linear(3, 1), [torch.ones(1, 3), torch.ones(1, 4)])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nothing_to_check_is_an_error():
    with pytest.raises(ValueError, match="at least one batch"):
        validate_module(nn.Linear(3, 1), [])
    with pytest.raises(ValueError, match="nothing that requires a gradient"):
        validate_module(nn.Linear(3, 1).requires_grad_(False), [torch.ones(1, 3)])


class Restless(nn.Module):
    """Changes all that a forward can: weights, buffers, modes, gradients, generators, its input."""

    def __init__(self, fails):
        super().__init__()
        self.body = model_with(Mended())
        self.register_buffer("calls", torch.zeros(1))
        self.fails = fails

    def forward(self, x):
        self.calls = self.calls + 1
        rng.seed_everything(99)
        with torch.no_grad():
            self.body[0].weight.mul_(2)
        x.zero_()
        self.body[4].train(not self.body[4].training)
        self.body[5].bias.requires_grad_(False)
        if self.fails and self.calls > 2:
            raise RuntimeError("broken")
        return self.body(x)


def fingerprint(model, batches):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None), *batches]
    values = [tensor.tolist() for tensor in tensors]
    flags = [(module.training) for module in model.modules()], [p.requires_grad for p in model.parameters()]
    state = rng.capture()
    return values, flags, state["torch"].tolist(), state["python"]["words"].tolist(), torch.is_anomaly_enabled()


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("fails", [True, False])
def test_everything_is_as_before(mode, fails):
    model = Restless(fails)
    model.train(mode != "eval")
    model.body[1].train(mode == "train")
    batches = [torch.randn(4, 3) for _ in range(4)]
    model.body(batches[0]).sum().backward()
    objects = [p.grad for p in model.parameters()], dict(model.named_buffers())
    before = fingerprint(model, batches)
    if fails:
        with pytest.raises(AnomalyError, match="batch 2: broken"):
            validate_module(model, batches)
    else:
        assert validate_module(model, batches) == 4
    assert fingerprint(model, batches) == before
    assert all(a is b for a, b in zip([p.grad for p in model.parameters()], objects[0], strict=True))
    assert all(buffer is objects[1][name] for name, buffer in model.named_buffers())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_in_eval_is_tried_in_training_mode():
    class Picky(nn.Linear):
        def forward(self, x):
            assert self.training
            return super().forward(x)

    assert validate_module(Picky(3, 1).eval(), torch.ones(2, 3)) == 1


def test_a_loader_s_own_generator_is_restored():
    def order(batches):
        return [batch[0][:, 0].tolist() for batch in batches]

    batches = loader(shuffle=True, generator=torch.Generator().manual_seed(5))
    state = batches.generator.get_state()
    expected = order(batches)
    batches.generator.set_state(state)
    validate_module(model_with(Mended()), batches)
    assert order(batches) == expected
