"""Ways to make a NaN or an infinity: each on the right operation, line and module, each with a mended twin."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safe_trainer.utils.tracer import Culprit, trace

INF = math.inf


class Scale(nn.Module):
    """Times one: hands the values through as they are, with a parameter whose gradient can go bad."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass
class Program:
    step: Callable[[], Any]
    model: nn.Module | None = None
    batch: Any = None


@dataclass
class Expected:
    build: Callable[[bool], Program]
    operation: str
    line: int
    kind: str = "forward"
    node: str | None = None
    module: str | None = "head"
    value: str | None = None
    says: str = ""


CASES: dict[str, Expected] = {}
SILENT: dict[str, Callable[[bool], Program]] = {}


def wrap(function: Callable[..., Tensor], values: Any, mended: bool) -> Program:
    x = torch.as_tensor(values, dtype=torch.float32)
    model = nn.Sequential()
    model.add_module("scale", Scale(tuple(x.shape)))
    model.add_module("head", Apply(lambda value: function(value, mended)))

    def step() -> Tensor:
        loss = model(x).float().sum()
        loss.backward()
        return loss

    return Program(step, model, x)


def marked(source: Any) -> int:
    lines, first = inspect.getsourcelines(source)
    return first + next(i for i, line in enumerate(lines) if "# culprit" in line)


def case(operation: str, values: Any, *, within: Any = None, **expected: Any) -> Callable[..., Any]:
    """A function (x, mended) -> tensor, which runs as module `head` on these values."""

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def build(mended: bool) -> Program:
            return wrap(function, values, mended)

        CASES[function.__name__] = Expected(build, operation, marked(within or function), **expected)
        return function

    return add


def program(operation: str, *, within: Any = None, **expected: Any) -> Callable[..., Any]:
    """A function (mended) -> Program."""

    def add(build: Callable[[bool], Program]) -> Callable[[bool], Program]:
        CASES[build.__name__] = Expected(build, operation, marked(within or build), **expected)
        return build

    return add


def silent(values: Any) -> Callable[..., Any]:
    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        SILENT[function.__name__] = lambda mended: wrap(function, values, mended)
        return function

    return add


# -- forward -----------------------------------------------------------------------------------------------------------


@case("aten.log", [0.0, 1.0, 2.0], value="-inf", says="logarithm of 0")
def log_of_zero(x: Tensor, mended: bool) -> Tensor:
    safe = x.clamp(min=1e-3) if mended else x
    return safe.log()  # culprit


@case("aten.log", [-1.0, 1.0, 2.0], value="nan", says="negative")
def log_of_a_negative(x: Tensor, mended: bool) -> Tensor:
    return torch.log(x.abs() if mended else x)  # culprit


@case("aten.log_", [0.0, 4.0, 9.0], value="-inf", says="min 0.0:")
def log_in_place(x: Tensor, mended: bool) -> Tensor:
    y = x + (1 if mended else 0)
    y.log_()  # culprit
    return y * 2


@case("aten.log_", [[0.0, 1.0], [2.0, 3.0]], value="-inf")
def log_in_place_on_a_view(x: Tensor, mended: bool) -> Tensor:
    y = x + (1 if mended else 0)
    y[0].log_()  # culprit
    return y.t() * 2


@case("aten.log1p", [-1.0, 1.0], value="-inf")
def log1p_at_minus_one(x: Tensor, mended: bool) -> Tensor:
    return torch.log1p(x.abs() if mended else x)  # culprit


@case("aten.div", [1.0, 0.0, 3.0], value="inf", says="divides by 0")
def division_by_zero(x: Tensor, mended: bool) -> Tensor:
    return 2.0 * x.new_ones(3) / (x + 0.5 if mended else x)  # culprit


@case("aten.div", [0.0, 0.0, 0.0], value="nan", says="0 / 0")
def normalising_a_zero_vector(x: Tensor, mended: bool) -> Tensor:
    length = torch.linalg.vector_norm(x).clamp(min=1e-6 if mended else 0.0)
    return x / length  # culprit


@case("aten.reciprocal", [1.0, 0.0], value="inf")
def one_over_the_mean(x: Tensor, mended: bool) -> Tensor:
    return 1 / ((x - 0.5).mean() + (0.1 if mended else 0.0))  # culprit


@case("aten.sqrt", [-1e-9, 1.0], value="nan", says="negative")
def sqrt_of_a_negative(x: Tensor, mended: bool) -> Tensor:
    return (x.abs() if mended else x).sqrt()  # culprit


@case("aten.rsqrt", [0.0, 1.0], value="inf")
def rsqrt_of_zero(x: Tensor, mended: bool) -> Tensor:
    return torch.rsqrt(x + (1e-3 if mended else 0.0))  # culprit


@case("aten.pow", [-2.0, 1.0], value="nan", says="negative base")
def pow_of_a_negative(x: Tensor, mended: bool) -> Tensor:
    return (x.abs() if mended else x) ** 0.4  # culprit


@case("aten.exp", [1.0, 100.0], value="inf", says="max 100")
def exp_overflow(x: Tensor, mended: bool) -> Tensor:
    return torch.exp(x - (x.max().detach() if mended else 0))  # culprit


@case("aten.exp", [1.0, 100.0], value="inf")
def softmax_by_hand(x: Tensor, mended: bool) -> Tensor:
    power = (x - (x.max() if mended else 0)).exp()  # culprit
    return power / power.sum()


@case("aten.log", [-200.0, -200.0], value="-inf")
def log_of_sum_of_exp(x: Tensor, mended: bool) -> Tensor:
    if mended:
        return x.logsumexp(0)
    return x.exp().sum().log()  # culprit


@case("aten.log", [0.0, 200.0], value="-inf", says="log_softmax")
def log_after_softmax(x: Tensor, mended: bool) -> Tensor:
    return x.log_softmax(0) if mended else x.softmax(0).log()  # culprit


@case("aten.mean", [1.0, 2.0], value="nan", says="no element")
def mean_of_an_empty_selection(x: Tensor, mended: bool) -> Tensor:
    return x[x > (0 if mended else 5)].mean()  # culprit


@case("aten.std", [[1.0], [2.0]], value="nan", says="one element")
def std_of_one_element(x: Tensor, mended: bool) -> Tensor:
    return x.std(dim=0 if mended else 1)  # culprit


@case("aten._softmax", [[1.0, 2.0], [3.0, 4.0]], value="nan", says="whole row was masked")
def softmax_over_a_masked_row(x: Tensor, mended: bool) -> Tensor:
    mask = torch.tensor([[True, False], [True, not mended]])
    scores = x.masked_fill(mask, -INF)
    return scores.softmax(-1)  # culprit


@case("aten.nll_loss_forward", [[1.0, 2.0], [3.0, 4.0]], value="inf", says="target class")
def cross_entropy_of_a_masked_class(x: Tensor, mended: bool) -> Tensor:
    logits = x.masked_fill(torch.tensor([[True, False], [False, True]]), -INF)
    target = torch.tensor([1, 0 if mended else 1])
    return F.cross_entropy(logits, target)  # culprit


@case("aten.nll_loss_forward", [[1.0, 2.0], [3.0, 4.0]], value="nan", says="ignore_index")
def cross_entropy_without_a_target(x: Tensor, mended: bool) -> Tensor:
    return F.cross_entropy(x, torch.tensor([-100, 0 if mended else -100]))  # culprit


@case("aten.logsumexp", [[1.0, 2.0], [3.0, 4.0]], value="-inf")
def logsumexp_of_a_masked_row(x: Tensor, mended: bool) -> Tensor:
    scores = x.masked_fill(torch.tensor([[True, False], [True, not mended]]), -INF)
    return scores.logsumexp(-1)  # culprit


@case("aten.mul", [[1.0, 2.0], [3.0, 4.0]], value="nan", says="-inf")
def entropy_of_masked_probabilities(x: Tensor, mended: bool) -> Tensor:
    worst = torch.finfo(x.dtype).min if mended else -INF
    logp = x.masked_fill(torch.tensor([True, False]), worst).log_softmax(-1)
    return logp.exp() * logp  # culprit


@case("aten.log", [0.2, 0.8], value="-inf")
def divergence_by_hand(x: Tensor, mended: bool) -> Tensor:
    if mended:
        return F.kl_div(x.log(), torch.tensor([0.0, 1.0]), reduction="sum")
    target = torch.tensor([0.0, 1.0]) * x.sum().detach()
    return (target * (target.log() - x.log())).sum()  # culprit


@case("aten.div", [0.0, 0.0], value="nan")
def cosine_by_hand(x: Tensor, mended: bool) -> Tensor:
    if mended:
        return F.cosine_similarity(x, torch.ones(2), dim=0)
    return (x * torch.ones(2)).sum() / (torch.linalg.vector_norm(x) * math.sqrt(2))  # culprit


@case("aten.cumprod", [1e20] * 3, value="inf")
def cumprod_overflow(x: Tensor, mended: bool) -> Tensor:
    return (x / (1e20 if mended else 1.0)).cumprod(0)  # culprit


@case("aten.acos", [1.0001, 0.0], value="nan", says="between -1 and 1")
def acos_beyond_one(x: Tensor, mended: bool) -> Tensor:
    return torch.acos(x.clamp(-0.999, 0.999) if mended else x)  # culprit


@case("aten.atanh", [1.0, 0.0], value="inf")
def atanh_of_one(x: Tensor, mended: bool) -> Tensor:
    return torch.atanh(x * (0.9 if mended else 1))  # culprit


@case("aten.logit", [1.0, 0.5], value="inf", says="inside")
def logit_of_one(x: Tensor, mended: bool) -> Tensor:
    return torch.logit(x, eps=1e-3 if mended else None)  # culprit


@case("aten.sub", [INF_INPUT := 3e38, 1.0], value="nan")
def infinity_from_an_earlier_mask(x: Tensor, mended: bool) -> Tensor:
    high = x.masked_fill(torch.tensor([True, not mended]), -INF)
    return (high - high.max()).exp()  # culprit


@case("aten.mul", [3.0, 1.0], value="inf", says="beyond the largest float32")
def product_overflow(x: Tensor, mended: bool) -> Tensor:
    big = x * 1e30
    return big * (1.0 if mended else 1e30)  # culprit


@case("aten.mm", [[3e4, 1.0], [2.0, 3e4]], value="inf", says="float16")
def autocast_fp16_overflow(x: Tensor, mended: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16 if mended else torch.float16):
        return x @ x  # culprit


@case("aten._to_copy", [1e6, 1.0], value="inf", says="65504")
def cast_overflow(x: Tensor, mended: bool) -> Tensor:
    return x.bfloat16() if mended else x.half()  # culprit


@case("aten.full", [1.0, 2.0], value="nan", says="program itself")
def written_nan(x: Tensor, mended: bool) -> Tensor:
    return x + torch.full((2,), 1.0 if mended else math.nan)  # culprit


@case("aten.log", [0.0, 1.0], value="-inf")
def log_through_a_python_number(x: Tensor, mended: bool) -> Tensor:
    level = (x + (1 if mended else 0)).min().log()  # culprit
    return x * level.item()


# -- backward ----------------------------------------------------------------------------------------------------------


@case("aten.div", [0.0, 1.0], kind="backward", node="SqrtBackward0", says="at 0 is infinite")
def sqrt_at_zero(x: Tensor, mended: bool) -> Tensor:
    y = torch.sqrt(x * x + (1e-6 if mended else 0.0))  # culprit
    return y * 2


@case("aten.div", [[0.0, 0.0], [3.0, 4.0]], kind="backward", node="SqrtBackward0")
def norm_by_hand_at_zero(x: Tensor, mended: bool) -> Tensor:
    if mended:
        return torch.linalg.vector_norm(x, dim=1)
    squares = x.pow(2).sum(dim=1)
    return squares.sqrt()  # culprit


@case("aten.exp", [100.0, 1.0], value="inf", says="guard its input")
def where_with_an_overflowing_branch(x: Tensor, mended: bool) -> Tensor:
    branch = torch.exp(x.clamp(max=10) if mended else x)  # culprit
    return torch.where(x > 10, x, branch)


@case("aten.div", [0.0, 1.0], kind="backward", node="LogBackward0", says="guard|clamp")
def where_with_a_log_branch(x: Tensor, mended: bool) -> Tensor:
    safe = torch.where(x > 0, x, 1.0) if mended else x
    branch = safe.log()  # culprit
    return torch.where(x > 0, branch, 0.0)


@case("aten.div", [0.0, 1.0], kind="backward", node="LogBackward0", says="clamping the result")
def log_clamped_too_late(x: Tensor, mended: bool) -> Tensor:
    y = (x.clamp(min=1e-3) if mended else x).log()  # culprit
    return y.clamp(min=-10)


@case("aten.pow", [0.0, 1.0], kind="backward", node="PowBackward0", says="exponent")
def pow_below_one_at_zero(x: Tensor, mended: bool) -> Tensor:
    return (x + (1e-3 if mended else 0.0)).pow(0.4)  # culprit


@case("aten.mul", [4e4, 1.0], kind="backward", node="PowBackward0", says="half precision")
def article_activation_in_half(x: Tensor, mended: bool) -> Tensor:
    h = x if mended else x.half()
    squared = h**2  # culprit
    return h * torch.exp(-squared)


@case("aten.div_", [2.0, 2.0], kind="backward", node="LinalgEighBackward0", says="coincide")
def eigenvectors_of_equal_eigenvalues(x: Tensor, mended: bool) -> Tensor:
    matrix = torch.diag(x + (torch.tensor([0.0, 0.5]) if mended else 0.0))
    vectors = torch.linalg.eigh(matrix).eigenvectors  # culprit
    return vectors * torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@case("aten.rsqrt", [1.0, 0.0], kind="backward", node="AsinBackward0", says="edge of its domain")
def asin_at_one(x: Tensor, mended: bool) -> Tensor:
    return torch.asin(x * (0.9 if mended else 1.0))  # culprit


@case("aten.rsqrt", [1.0, 0.0], kind="backward", node="AcosBackward0", says="edge of its domain")
def acos_at_one(x: Tensor, mended: bool) -> Tensor:
    return torch.acos(x * (0.9 if mended else 1.0))  # culprit


@case("aten.mul", [1e-30, 1e30], kind="backward", node="MulBackward0", says="beyond the largest")
def article_mul_backward(x: Tensor, mended: bool) -> Tensor:
    weight = x[1].detach() * (1e-30 if mended else 1.0)
    y = x[0] * weight  # culprit
    return y * 1e20


@case("aten.div", [[0.0, 1.0], [2.0, 3.0]], kind="backward", node="torch::autograd::CopySlices")
def sqrt_in_place_on_a_view(x: Tensor, mended: bool) -> Tensor:
    y = x + (1.0 if mended else 0.0)
    y[0].sqrt_()  # culprit
    return y * 2


@case("aten.mul", [50.0, 1.0], kind="backward", node="MulBackward0", value="inf")
def second_derivative(x: Tensor, mended: bool) -> Tensor:
    power = (x / (10.0 if mended else 1.0)).exp()  # culprit
    tiny = x * 1e-32
    (slope,) = torch.autograd.grad((power * tiny).sum(), x, create_graph=True)
    return slope * 1e20


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mended: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mended = mended
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        below = x.abs() + (1e-3 if ctx.mended else 0.0)
        return grad * x / below, None  # culprit


@case("aten.div", [0.0, 1.0], within=Steep, kind="backward", node="SteepBackward", says="0 / 0")
def custom_backward(x: Tensor, mended: bool) -> Tensor:
    return Steep.apply(x, mended)


class Logarithm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mended: bool) -> Tensor:
        return torch.log(x + (1.0 if mended else 0.0))  # culprit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@case("aten.log", [0.0, 1.0], within=Logarithm, value="-inf")
def custom_forward(x: Tensor, mended: bool) -> Tensor:
    return Logarithm.apply(x, mended)


@torch.library.custom_op("tracer_matrix::ratio", mutates_args=())
def ratio(x: Tensor, y: Tensor) -> Tensor:
    return x / y


def _ratio_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _ratio_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return grad / y, -grad * x / (y * y)


ratio.register_autograd(_ratio_backward, setup_context=_ratio_setup)


@case("tracer_matrix.ratio", [0.0, 1.0], value="inf")
def custom_operator(x: Tensor, mended: bool) -> Tensor:
    return ratio(torch.ones(2), x + (1.0 if mended else 0.0))  # culprit


@torch.library.custom_op("tracer_matrix::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def _twice_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2e30 * 1e30  # culprit


def _twice_mended(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2


twice.register_autograd(_twice_backward)


@torch.library.custom_op("tracer_matrix::twice_mended", mutates_args=())
def twice_mended(x: Tensor) -> Tensor:
    return x * 2


twice_mended.register_autograd(_twice_mended)


@case("aten.mul", [1.0, 2.0], within=_twice_backward, kind="backward", node="...twice", value="inf")
def custom_operator_backward(x: Tensor, mended: bool) -> Tensor:
    return twice_mended(x) if mended else twice(x)


@case("aten.mul", [1.0, 2.0], kind="backward", node="MulBackward0", value="inf")
def gradient_hook(x: Tensor, mended: bool) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * (1.0 if mended else 1e30) * 1e30)  # culprit
    return y


def _inner(x: Tensor, mended: bool) -> Tensor:
    hidden = x.tanh()
    return torch.log(hidden + (1.0 if mended else 0.0))  # culprit


@case("aten.log", [0.0, 1.0], within=_inner, value="-inf")
def checkpoint_reentrant(x: Tensor, mended: bool) -> Tensor:
    return checkpoint(_inner, x, mended, use_reentrant=True)


@case("aten.log", [0.0, 1.0], within=_inner, value="-inf")
def checkpoint_not_reentrant(x: Tensor, mended: bool) -> Tensor:
    return checkpoint(_inner, x, mended, use_reentrant=False)


def _rooted(x: Tensor, mended: bool) -> Tensor:
    return torch.sqrt(x * x + (1e-6 if mended else 0.0))  # culprit


@case("aten.div", [0.0, 1.0], within=_rooted, kind="backward", node="SqrtBackward0")
def checkpoint_reentrant_backward(x: Tensor, mended: bool) -> Tensor:
    return checkpoint(_rooted, x, mended, use_reentrant=True)


@case("aten.div", [0.0, 1.0], within=_rooted, kind="backward", node="SqrtBackward0")
def checkpoint_not_reentrant_backward(x: Tensor, mended: bool) -> Tensor:
    return checkpoint(_rooted, x, mended, use_reentrant=False)


def _hidden_exp(x: Tensor, mended: bool) -> Tensor:
    branch = torch.exp(x.clamp(max=10) if mended else x)  # culprit
    return torch.where(x > 10, x, branch)


@case("aten.exp", [100.0, 1.0], within=_hidden_exp, value="inf")
def checkpoint_saved_infinity(x: Tensor, mended: bool) -> Tensor:
    return checkpoint(_hidden_exp, x, mended, use_reentrant=False)


# -- whole programs ----------------------------------------------------------------------------------------------------


class OwnBatchNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        deviation = (x.var(0, unbiased=False) + self.eps).sqrt()
        return self.weight * (centred / deviation)  # culprit


@program("aten.div", within=OwnBatchNorm, module="1", value="nan", says="0 / 0")
def batch_norm_without_eps(mended: bool) -> Program:
    model = nn.Sequential(nn.Linear(3, 2), OwnBatchNorm(1e-5 if mended else 0.0))
    x = torch.ones(4, 3)
    return Program(backward_of(lambda: model(x).square().sum()), model, x)


def backward_of(loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        return loss

    return step


@program("aten.addmm", kind="input", module="0", value="nan", says=r"rows 1, 3")
def nan_in_the_batch(mended: bool) -> Program:
    torch.manual_seed(0)
    x = torch.randn(5, 3)
    if not mended:
        x[1, 2] = x[3, 0] = math.nan
    model, target = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), torch.ones(5, 1)
    return Program(
        backward_of(lambda: F.mse_loss(model(x), target)),  # culprit
        model,
        {"x": x, "y": target},
    )


@program("aten.mse_loss", kind="input", module=None, value="inf")
def infinity_in_the_target(mended: bool) -> Program:
    model, x = nn.Linear(3, 1), torch.ones(2, 3)
    target = torch.tensor([[1.0], [1.0 if mended else INF]])
    return Program(backward_of(lambda: F.mse_loss(model(x), target)), model, (x, target))  # culprit


@program("aten.addmm", kind="parameter", module="2", value="nan", says="earlier step")
def weights_poisoned_by_the_optimizer(mended: bool) -> Program:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for parameter in model[2].parameters():
        parameter.grad = torch.full_like(parameter, 1.0 if mended else math.nan)
    optimizer.step()
    optimizer.zero_grad()
    return Program(backward_of(lambda: model(x).sum()), model, (x,))  # culprit


@program("aten.native_batch_norm", kind="buffer", module="norm", value="nan", says="reset")
def running_statistics_poisoned(mended: bool) -> Program:
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(3))
    model[0].running_var[1] = 1.0 if mended else math.nan
    model.eval()
    x = torch.ones(2, 3)
    return Program(backward_of(lambda: model(x).sum()), model, (x,))  # culprit


class Recurrent(nn.Module):
    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        probability = self.head(hidden[:, -1]).relu() * 0 + (0.5 if self.mended else 0.0)
        return probability.log()  # culprit


@program("aten.log", within=Recurrent, module=None, value="-inf")
def log_after_an_lstm(mended: bool) -> Program:
    model, x = Recurrent(mended), torch.ones(2, 5, 3)
    return Program(backward_of(lambda: model(x).sum()), model, x)


class Gated(nn.Module):
    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 3)
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(2, 3)
        for t in range(x.shape[1]):
            hidden = self.cell(x[:, t], hidden)
            hidden = hidden / (hidden.sum() * (1.0 if self.mended else 0.0))  # culprit
        return hidden


@program("aten.div", within=Gated, module="gru", value="inf")
def division_in_a_gru_loop(mended: bool) -> Program:
    torch.manual_seed(0)
    model, x = nn.Sequential(), torch.ones(2, 3, 3)
    model.add_module("gru", Gated(mended))
    return Program(backward_of(lambda: model(x).sum()), model, x)


class Attention(nn.Module):
    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = torch.ones(3, 3, dtype=torch.bool).tril(0 if self.mended else -1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, -INF)
        weights = scores.softmax(-1)  # culprit
        return weights @ v


@program("aten._softmax", within=Attention, module="blocks.1.attn", value="nan", says="whole row")
def attention_with_a_masked_row(mended: bool) -> Program:
    torch.manual_seed(0)
    model, x = nn.Module(), torch.randn(2, 3, 4)
    model.blocks = nn.ModuleList(nn.ModuleDict({"attn": Attention(mended or i == 0)}) for i in range(2))
    return Program(backward_of(lambda: model.blocks[1]["attn"](model.blocks[0]["attn"](x)).sum()), model, x)


@program("aten.embedding", kind="parameter", module=None, value="nan")
def embedding_row_poisoned(mended: bool) -> Program:
    table = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        table.weight[2] = 1.0 if mended else math.nan
    tokens = torch.tensor([0, 2])
    return Program(backward_of(lambda: table(tokens).sum()), table, tokens)  # culprit


@program("aten.div", kind="backward", node="SqrtBackward0", module=None)
def sparse_gradient(mended: bool) -> Program:
    table = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        table.weight.zero_()
    tokens, eps = torch.tensor([0, 2]), 1e-6 if mended else 0.0
    return Program(backward_of(lambda: (table(tokens).square().sum(1) + eps).sqrt().sum()), table, tokens)  # culprit


@program("aten.div", kind="backward", node="SqrtBackward0", module=None)
def gradient_penalty(mended: bool) -> Program:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.zero_()
    x = torch.ones(2, 3, requires_grad=True)

    def loss_of() -> Tensor:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        length = (grad.square().sum(1) + (1e-6 if mended else 0.0)).sqrt()  # culprit
        return (length - 1).square().mean() + model(x).mean()

    return Program(backward_of(loss_of), model, x)


@program("aten.log", module=None, value="-inf")
def second_of_two_losses(mended: bool) -> Program:
    model, x = nn.Linear(3, 2), torch.ones(2, 3)

    def step() -> None:
        output = model(x)
        output.sum().backward(retain_graph=True)
        second = (output * 0 + (1.0 if mended else 0.0)).log().sum()  # culprit
        second.backward()

    return Program(step, model, x)


@program("aten.div", module=None, value="nan")
def loss_that_divides_by_a_count(mended: bool) -> Program:
    model, x = nn.Linear(3, 2), torch.ones(2, 3)
    mask = torch.zeros(2, 2)

    def loss_of() -> Tensor:
        count = mask.sum().clamp(min=1 if mended else 0)
        return (model(x) * mask).sum() / count  # culprit

    return Program(backward_of(loss_of), model, (x, mask))


# -- a real fault beside legal infinities ------------------------------------------------------------------------------


@case("aten.log", [[1.0, 2.0], [3.0, 4.0]], value="-inf")
def log_after_a_causal_mask(x: Tensor, mended: bool) -> Tensor:
    mask = torch.triu(torch.full((2, 2), -INF), 1)
    weights = (x + mask).softmax(-1)
    return (weights + (1e-3 if mended else 0.0)).log()  # culprit


@case("aten.sqrt", [[-1.0, 2.0], [3.0, 4.0]], value="nan")
def nan_before_a_causal_mask(x: Tensor, mended: bool) -> Tensor:
    mask = torch.triu(torch.full((2, 2), -INF), 1)
    scores = (x.abs() if mended else x).sqrt()  # culprit
    return (scores + mask).softmax(-1)


@case("aten.exp", [[100.0, 2.0], [3.0, 4.0]], value="inf")
def overflow_before_a_causal_mask(x: Tensor, mended: bool) -> Tensor:
    scores = (x / 100 if mended else x).exp()  # culprit
    return scores.masked_fill(torch.tensor([[False, True], [False, False]]), -INF).softmax(-1)


@case("aten.acos", [[2.0, 0.2], [0.3, 0.4]], value="nan")
def fault_in_the_values_of_attention(x: Tensor, mended: bool) -> Tensor:
    values = torch.acos(x.clamp(-0.9, 0.9) if mended else x)  # culprit
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, values[None, None], is_causal=True)


@case("aten.exp", [0.0, 400.0, 1.0], value="inf")
def fault_in_the_other_branch(x: Tensor, mended: bool) -> Tensor:
    hidden = 1 / x.detach()
    shown = torch.exp(x.clamp(max=10) if mended else x)  # culprit
    return torch.where(x != 1, shown, hidden)


@case("aten.exp", [0.0, 400.0, 1.0], value="inf")
def infinity_hidden_under_an_infinity(x: Tensor, mended: bool) -> Tensor:
    hidden = 1 / (x.detach() - 400)
    shown = torch.exp(x.clamp(max=10) if mended else x)  # culprit
    return torch.where(x > 1, shown, hidden)


@case("aten.log", [0.0, 1.0, 2.0], value="-inf")
def fault_written_over_nan(x: Tensor, mended: bool) -> Tensor:
    buffer = torch.full((3,), math.nan)
    buffer.copy_((x + (1.0 if mended else 0.0)).log())  # culprit
    return buffer * x


@case("aten.acos", [0.0, 2.0, 1.0], value="nan")
def nan_beside_an_infinity(x: Tensor, mended: bool) -> Tensor:
    far = (1 / x.detach())[None].expand(2, 3)
    angle = torch.acos(x.clamp(-0.9, 0.9) if mended else x)  # culprit
    joined = torch.cat((far, angle[None]))
    return joined.amax(0)[1]


@case("aten.sqrt", [0.0, -1.0, 4.0], value="nan")
def fault_beside_a_hidden_infinity(x: Tensor, mended: bool) -> Tensor:
    hidden = 1 / x.detach()
    roots = (x.detach().abs() if mended else x.detach()).sqrt()  # culprit
    picked = torch.where(x == 0, 0.0, hidden)
    return x * torch.where(x < 0, roots, picked)


@case("aten.div", [1.0, 2.0, 3.0], value="nan")
def fault_after_a_masked_maximum(x: Tensor, mended: bool) -> Tensor:
    best = x.masked_fill(x > 2, -INF).max()
    return (x - x) / (best - 2 + (1 if mended else 0))  # culprit


@case("aten.rsqrt", [0.0, 4.0, 1.0], value="inf")
def two_writers_of_one_buffer(x: Tensor, mended: bool) -> Tensor:
    rows = torch.zeros(2, 3)
    rows[0] = torch.full((3,), -INF)
    rows[1] = torch.rsqrt(x + (1.0 if mended else 0.0))  # culprit
    return rows[1] * 2


# -- legal infinities --------------------------------------------------------------------------------------------------


@silent([[1.0, 2.0], [3.0, 4.0]])
def causal_mask_added(x: Tensor, mended: bool) -> Tensor:
    return (x + torch.triu(torch.full((2, 2), -INF), 1)).softmax(-1)


@silent([[1.0, 2.0], [3.0, 4.0]])
def causal_mask_filled(x: Tensor, mended: bool) -> Tensor:
    return x.masked_fill(torch.ones(2, 2).triu(1).bool(), -INF).softmax(-1)


@silent([[1.0, 2.0], [3.0, 4.0]])
def attention_kernel_causal(x: Tensor, mended: bool) -> Tensor:
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@silent([[1.0, 2.0], [3.0, 4.0]])
def attention_kernel_with_a_mask(x: Tensor, mended: bool) -> Tensor:
    q, mask = x[None, None], torch.tensor([[True, False], [True, True]])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@silent([0.0, 1.0, 2.0])
def masked_mean_of_a_loss(x: Tensor, mended: bool) -> Tensor:
    per_item = -torch.log(torch.tensor([0.0, 0.5, 0.6])) * 1.0
    return (x * 2).mean() + per_item[torch.tensor([False, True, True])].mean()


@silent([0.0, 1.0, 2.0])
def clamped_log_of_data(x: Tensor, mended: bool) -> Tensor:
    return x * torch.log(x.detach()).clamp(min=-100)


@silent([0.0, 1.0, 2.0])
def where_guarded_on_its_input(x: Tensor, mended: bool) -> Tensor:
    safe = torch.where(x > 0, x, torch.ones(()))
    return torch.where(x > 0, safe.log(), 0.0)


@silent([0.0, 1.0, 2.0])
def infinity_absorbed_by_exp(x: Tensor, mended: bool) -> Tensor:
    return x * torch.exp(-1 / x.detach())


@silent([0.0, 1.0, 2.0])
def minimum_from_infinity(x: Tensor, mended: bool) -> Tensor:
    distance = (x[:, None] - x[None]).abs()
    return distance.clone().fill_diagonal_(INF).min(dim=1).values


@silent([0.0, 1.0, 2.0])
def running_maximum(x: Tensor, mended: bool) -> Tensor:
    best, total = torch.tensor(-INF), torch.zeros(())
    for value in x:
        new = torch.maximum(best, value)
        total, best = total * torch.exp(best - new) + torch.exp(value - new), new
    return best + total.log()


@silent([0.5, 0.5, 2.0])
def binary_cross_entropy_at_the_edge(x: Tensor, mended: bool) -> Tensor:
    probability = torch.stack((x[0] * 0, x[1] * 2))
    return F.binary_cross_entropy(probability, torch.tensor([0.0, 1.0]))


@silent([1.0, 2.0, 3.0])
def nan_marks_missing_values(x: Tensor, mended: bool) -> Tensor:
    measured = torch.tensor([1.0, math.nan, 2.0])
    return torch.where(measured.isnan(), 0.0, x * measured.nan_to_num()) + measured.nanmean()


@silent([1.0, 2.0, 3.0])
def memory_filled_after_empty(x: Tensor, mended: bool) -> Tensor:
    buffer = torch.empty(2, 3).fill_(math.nan)
    buffer[0] = x
    buffer[1].copy_(x * 2)
    return buffer * 2


@silent([1.0, 2.0, 3.0])
def healed_in_place(x: Tensor, mended: bool) -> Tensor:
    y = (x.detach() - 1).log()
    y[y.isinf()] = 0.0
    return x * y


@silent([0.0, 1.0])
def angle_at_the_origin(x: Tensor, mended: bool) -> Tensor:
    return torch.atan2(x, x)  # torch defines its gradient at (0, 0) as 0


@silent([[0.0, 0.0], [3.0, 4.0]])
def norm_at_zero(x: Tensor, mended: bool) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1) + x.norm(dim=1)  # torch takes 0, a subgradient


@silent([[3.0, 2.0, 1.0]])
def invalid_actions_masked(x: Tensor, mended: bool) -> Tensor:
    logits = x.masked_fill(torch.tensor([False, True, False]), -INF)
    return torch.distributions.Categorical(logits=logits, validate_args=False).log_prob(torch.tensor([2]))


@silent([[3.0, 2.0, 1.0]])
def top_k_filtering(x: Tensor, mended: bool) -> Tensor:
    threshold = x.topk(2).values[:, -1:]
    return torch.where(x < threshold, -INF, x).softmax(-1).square()


def judge(build: Callable[[bool], Program], mended: bool) -> Culprit | None:
    made = build(mended)
    verdict = trace(made.step, model=made.model, batch=made.batch)
    assert verdict.error is None
    assert verdict.reproduced == (verdict.culprit is not None)
    return verdict.culprit


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("name", CASES)
def test_names_operation_line_and_module(name: str) -> None:
    expected = CASES[name]
    culprit = judge(expected.build, mended=False)
    assert culprit is not None
    assert (culprit.operation, culprit.kind) == (expected.operation, expected.kind)
    assert (culprit.source, culprit.module) == (f"{Path(__file__).name}:{expected.line}", expected.module)
    assert culprit.path is not None
    assert Path(culprit.path) == Path(__file__)
    assert "# culprit" in culprit.code
    if expected.node is not None and "..." in expected.node:
        assert culprit.node is not None
        assert expected.node.strip(".") in culprit.node
    else:
        assert culprit.node == expected.node
    assert expected.value in (None, culprit.value)
    paragraph = culprit.describe()
    assert culprit.source in paragraph
    assert culprit.remedy in paragraph
    assert re.search(expected.says, paragraph), paragraph


@pytest.mark.parametrize("name", CASES)
def test_mended_twin_has_no_culprit(name: str) -> None:
    assert judge(CASES[name].build, mended=True) is None


@pytest.mark.parametrize("name", SILENT)
def test_legal_infinities_are_no_culprits(name: str) -> None:
    assert judge(SILENT[name], mended=False) is None


def test_matrix_is_as_large_as_promised() -> None:
    assert len(CASES) >= 30
    assert len(SILENT) >= 8
    assert sum(expected.kind == "backward" for expected in CASES.values()) >= 12
