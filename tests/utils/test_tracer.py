"""The tracer leaves a step as it is, survives what a step may do, and says what it knows."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from safe_trainer.utils.provenance import Damage, Operand, Producers
from safe_trainer.utils.remedies import Facts, explain
from safe_trainer.utils.source_lines import owner, parse_traceback
from safe_trainer.utils.tracer import find_loss, trace


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)).flatten(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 8, 8))[0].mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        return self.head(checkpoint(self.layer, x.view(-1, 8, 8), mask, use_reentrant=False).mean(1))


def one_step(kind: type[nn.Module], autocast: bool, traced: bool) -> dict[str, Tensor]:
    """Weights, buffers, gradients, loss and the generator's state after one step."""
    torch.manual_seed(3)
    model, x, y = kind(), torch.randn(6, 64), torch.tensor([0, 1, 2, 0, 1, 2])

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = trace(step, model=model, batch=(x, y)).loss if traced else step()
    assert loss is not None
    after = {name: value.clone() for name, value in model.state_dict().items()}
    after |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return after | {"loss": loss.detach(), "generator": torch.get_rng_state()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [Cnn, Lstm, Transformer])
def test_step_is_bit_equal_to_one_without_the_tracer(kind: type[nn.Module], autocast: bool) -> None:
    bare, traced = one_step(kind, autocast, False), one_step(kind, autocast, True)
    assert bare.keys() == traced.keys()
    for name, value in bare.items():
        assert torch.equal(value, traced[name]), name


@pytest.fixture(params=[(False, True), (True, True), (True, False)])
def anomaly(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool]]:
    with torch.autograd.set_detect_anomaly(*request.param):
        yield request.param


@pytest.mark.parametrize("raises", [False, True])
def test_anomaly_setting_is_restored(anomaly: tuple[bool, bool], raises: bool) -> None:
    def step() -> Tensor:
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
        if raises:
            raise RuntimeError("stop")
        return torch.ones(())

    verdict = trace(step)
    assert isinstance(verdict.error, RuntimeError if raises else type(None))
    assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == anomaly


def test_no_hook_and_no_mode_is_left() -> None:
    model, x = Cnn(), torch.ones(2, 64)
    trace(lambda: model(x).sum().backward(), model=model)
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        assert not any(hooks)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_finite_tensors_are_not_kept_and_bad_ones_are() -> None:
    alive: dict[str, bool] = {}

    def step() -> Tensor:
        tensors = {"good": torch.ones(1000) * 2, "bad": torch.zeros(1000).log(), "healed": torch.zeros(1000).log()}
        tensors["healed"].mul_(0).fill_(1.0)
        addresses = {name: tensor.untyped_storage()._weak_ref() for name, tensor in tensors.items()}
        tensors.clear()
        gc.collect()
        alive.update({k: not torch.UntypedStorage._expired(address) for k, address in addresses.items()})
        for address in addresses.values():
            torch.UntypedStorage._free_weak_ref(address)
        return torch.ones(())

    verdict = trace(step)
    assert alive == {"good": False, "bad": True, "healed": False}
    assert verdict.culprit is None


def test_nothing_outlives_the_trace() -> None:
    kept: list[Any] = []

    def step() -> Tensor:
        bad = torch.zeros(10).log()
        kept.append(weakref.ref(bad))
        return bad.sum()

    verdict = trace(step)
    del step
    gc.collect()
    assert verdict.culprit is not None
    assert kept[0]() is None


def test_paragraph_reads_as_promised() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(4, 5))
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    with torch.no_grad():
        model[0].bias[1] = 0.0

    def step() -> Tensor:
        loss = -model(torch.ones(3, 4)).log().sum()  # log
        loss.backward()
        return loss

    culprit = trace(step, model=model).culprit
    assert culprit is not None
    assert culprit.line is not None
    assert culprit.describe().startswith(
        f"aten.log gave -inf in 3 of 15 elements at test_tracer.py:{culprit.line}, its input has min 0.0"
    )
    assert (culprit.first_index, culprit.shape, culprit.dtype) == ((0, 1), (3, 5), torch.float32)
    assert culprit.operands == (Operand("self", (3, 5), torch.float32, 0.0, 1.0, 0, 0.0),)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x  # inside


def line_of(mark: str) -> str:
    with open(__file__, encoding="utf-8") as lines:
        return next(f"test_tracer.py:{n}" for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}"))


def test_custom_function_gives_both_lines() -> None:
    weight = nn.Parameter(torch.tensor([0.0, 1.0]))

    def step() -> Tensor:
        loss = Reversed.apply(weight).sum()  # applied
        loss.backward()
        return loss

    culprit = trace(step, watched={"weight": weight}).culprit
    assert culprit is not None
    assert (culprit.source, culprit.applied_at) == (line_of("inside"), line_of("applied"))
    assert culprit.node == "ReversedBackward"
    assert f"applied at {culprit.applied_at}" in culprit.describe()


@pytest.mark.parametrize("shape", ["tensor", "mapping", "tuple", "object", "nothing"])
def test_loss_is_found_in_what_the_step_returns(shape: str) -> None:
    weight = nn.Parameter(torch.zeros(2))

    def step() -> Any:
        loss = torch.where(weight.detach() > 0, 0.0, INFINITE).sum() + weight.sum()
        loss.backward()
        output = weight.detach().clone()
        returned = type("Output", (), {"loss": loss})
        return {
            "tensor": loss,
            "mapping": {"out": output, "loss": loss},
            "tuple": (output, loss),
            "object": returned,
        }.get(shape)

    verdict = trace(step, watched={"weight": weight})
    assert verdict.reproduced
    assert verdict.bad == ("loss",)
    assert (verdict.loss is None) == (shape == "nothing")


INFINITE = math.inf


def test_first_scalar_of_a_tuple_is_the_loss() -> None:
    assert find_loss((torch.ones(3), torch.tensor(2), torch.tensor(3.0))) == 3.0
    assert find_loss(5.0) is None


def test_step_that_raises_after_the_fault() -> None:
    weight = nn.Parameter(torch.zeros(2))

    def step() -> Tensor:
        masked = torch.full((2,), -math.inf).softmax(0).nan_to_num() + weight.masked_fill(weight > -1, -math.inf).exp()
        loss = (weight.log() + masked).sum()  # raised later
        if not torch.isfinite(loss):
            torch.exp(-1 / torch.zeros(2))  # an infinity that comes later, but is made finite again
            raise ValueError("loss is not finite")
        return loss

    verdict = trace(step)
    assert isinstance(verdict.error, ValueError)
    assert verdict.reproduced
    assert verdict.culprit is not None
    assert verdict.culprit.operation == "aten.log"
    assert verdict.culprit.source == line_of("raised later")


def test_operation_that_raises_on_a_nan() -> None:
    def step() -> Tensor:
        probability = torch.zeros(2) / torch.zeros(2)
        torch.ones(3).log()
        return torch.multinomial(probability, 1)

    verdict = trace(step)
    assert isinstance(verdict.error, RuntimeError)
    assert verdict.culprit is not None
    assert verdict.culprit.operation == "aten.div"


def test_exception_without_a_fault_blames_nothing() -> None:
    def step() -> Tensor:
        scores = torch.ones(2).masked_fill(torch.tensor([True, False]), -math.inf).softmax(0)
        raise KeyError(scores.sum().item())

    verdict = trace(step)
    assert isinstance(verdict.error, KeyError)
    assert verdict.culprit is None
    assert not verdict.reproduced


def test_keyboard_interrupt_goes_through() -> None:
    def step() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace(step)
    assert not torch.is_anomaly_enabled()


def test_healthy_step_is_not_reproduced() -> None:
    weight = nn.Parameter(torch.ones(2))
    verdict = trace(lambda: weight.exp().sum().backward(), watched=[weight])
    assert (verdict.culprit, verdict.reproduced, verdict.bad, verdict.error) == (None, False, (), None)
    assert verdict.operations > 3


def test_gradients_that_the_step_clears_still_count() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])

    def step() -> Tensor:
        loss = (weight * weight).sqrt().sum()
        loss.backward()
        weight.grad = None
        optimizer.step()
        return loss

    verdict = trace(step, watched={"weight": weight})
    assert verdict.bad == ("gradient of weight",)
    assert verdict.culprit is not None
    assert verdict.culprit.node == "SqrtBackward0"


@pytest.mark.parametrize("foreach", [False, True])
def test_weights_that_the_step_poisons_are_followed_to_the_gradient(foreach: bool) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=foreach)

    def step() -> Tensor:
        loss = (weight * weight).sqrt().sum()
        (weight.grad,) = torch.autograd.grad(loss, weight)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    verdict = trace(step, watched={"weight": weight})
    assert verdict.bad == ("weight",)
    assert verdict.culprit is not None
    assert verdict.culprit.node == "SqrtBackward0"


def test_gradient_that_was_bad_before_the_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([math.nan, 0.0])
    culprit = trace(lambda: weight.sum().backward(), watched={"weight": weight}).culprit
    assert culprit is not None
    assert (culprit.kind, culprit.name) == ("parameter", "the gradient of weight")


def test_buffer_that_the_step_poisons() -> None:
    norm = nn.BatchNorm1d(2)
    x = torch.tensor([[1e30, 0.0], [-1e30, 1.0]])
    verdict = trace(lambda: norm(x).detach().nan_to_num().sum(), model=norm, batch=x)
    assert "running_var" in verdict.bad
    assert verdict.culprit is not None
    assert verdict.culprit.operation == "aten.native_batch_norm"
    assert "variance" in verdict.culprit.describe()


def test_buffer_that_was_bad_before_is_not_the_steps_fault() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("lowest", torch.tensor(-math.inf))
    model.register_buffer("broken", torch.tensor(math.nan))
    assert not trace(lambda: model(torch.ones(2, 2)).sum().backward(), model=model).reproduced


@pytest.mark.parametrize("infinite", [False, True])
def test_mask_in_a_buffer_or_the_batch_is_legal(infinite: bool) -> None:
    model = nn.Linear(3, 3)
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(0 if infinite else 1).bool(), -math.inf)
    model.register_buffer("mask", mask)
    verdict = trace(lambda: (model.weight + model.mask).softmax(-1).sum().backward(), model=model)
    assert (verdict.culprit.operation if verdict.culprit else None) == ("aten._softmax" if infinite else None)
    in_batch = trace(lambda: (model.weight + mask).softmax(-1).sum().backward(), batch={"mask": mask})
    assert (in_batch.culprit.operation if in_batch.culprit else None) == ("aten._softmax" if infinite else None)


def test_batch_entry_is_named_through_nesting_and_copies() -> None:
    array = np.ones((4, 2), dtype=np.float32)
    array[2, 1] = np.nan
    weight = nn.Parameter(torch.ones(2))
    batch = [{"ids": torch.ones(2)}, {"x": array}]

    def step() -> Tensor:
        x = torch.from_numpy(batch[1]["x"]).to(torch.float64)
        loss = (x * weight).sum()
        loss.backward()
        return loss

    culprit = trace(step, batch=batch, watched=[weight]).culprit
    assert culprit is not None
    assert (culprit.kind, culprit.name, culprit.rows) == ("input", "batch[1]['x']", (2,))


def test_tensor_from_outside_is_named_by_the_line_that_reads_it() -> None:
    secret, weight = torch.tensor([1.0, math.inf]), nn.Parameter(torch.ones(2))
    culprit = trace(lambda: (weight * secret).sum().backward(), watched=[weight]).culprit  # outside
    assert culprit is not None
    assert (culprit.kind, culprit.name, culprit.source) == (
        "input",
        "a tensor from outside the step",
        line_of("outside"),
    )


@pytest.mark.parametrize("like", [False, True])
def test_uninitialised_memory_is_named(like: bool) -> None:
    def step() -> Tensor:
        template = torch.zeros(3).log()
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that the test does not rest on luck
        try:
            return (torch.empty_like(template) if like else torch.empty(3)).sum()  # uninitialised
        finally:
            torch.use_deterministic_algorithms(False)

    culprit = trace(step).culprit
    assert culprit is not None
    assert (culprit.operation, culprit.source) == (
        "aten.empty_like" if like else "aten.empty",
        line_of("uninitialised"),
    )


def test_infinite_number_read_from_a_tensor_leads_back() -> None:
    def step() -> Tensor:
        scale = torch.zeros(()).log().item()
        return torch.tensor([scale]) * torch.ones(1)

    culprit = trace(step).culprit
    assert culprit is not None
    assert culprit.operation == "aten.log"


def test_gradients_that_overflow_when_they_are_added_up() -> None:
    weight = nn.Parameter(torch.ones(1))

    def step() -> None:
        h = weight * 1
        (h * 3e38 + h * 3e38).sum().mul(1e-38).sub(1).backward(torch.tensor(1e38))

    verdict = trace(step, watched=[weight])
    assert verdict.culprit is not None
    assert verdict.culprit.kind in ("forward", "backward")


def wrapper() -> Tensor:
    return TwoTensor(torch.zeros(3), torch.ones(3)).log().sum()


def vectorised() -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: x.log().sum()))(torch.zeros(2, 3)).sum()


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged).log().values().sum()


def branched() -> Tensor:
    return torch.view_as_complex(torch.zeros(2, 2)).log().abs().sum()


@pytest.mark.parametrize("step", [wrapper, vectorised, jagged, branched])
def test_unusual_tensors(step: Callable[[], Tensor]) -> None:
    culprit = trace(step).culprit
    assert culprit is not None
    assert culprit.operation == "aten.log"


@pytest.mark.slow  # imports the compiler
@pytest.mark.parametrize("way", ["compiled", "cond"])
def test_compiled_code_runs_eagerly_and_control_flow_is_one_operation(way: str) -> None:
    def body(x: Tensor) -> Tensor:
        return x.log()

    compiled = torch.compile(body, backend="eager", fullgraph=True)
    compiled(torch.ones(2))

    def step() -> Tensor:
        if way == "compiled":
            return compiled(torch.zeros(2)).sum()
        return torch.cond(torch.tensor(True), body, torch.exp, (torch.zeros(2),)).sum()

    culprit = trace(step).culprit
    assert culprit is not None
    assert culprit.operation == ("aten.log" if way == "compiled" else "cond")


def test_works_inside_another_dispatch_mode() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        culprit = trace(lambda: torch.zeros(2).log().sum()).culprit
    assert culprit is not None
    assert Counting.count > 0


def test_gradient_scaler_and_clipping_in_the_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")

    def step() -> Tensor:
        loss = (weight * weight).sqrt().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    culprit = trace(step, watched=[weight]).culprit
    assert culprit is not None
    assert culprit.node == "SqrtBackward0"


def test_filling_a_buffer_row_by_row_stays_quick() -> None:
    def step() -> Tensor:
        rows, x = torch.zeros(300, 4), torch.zeros(4)
        for row in range(300):
            rows[row] = x.log()
        return rows.sum()

    start = time.perf_counter()
    culprit = trace(step).culprit
    assert culprit is not None
    assert culprit.operation == "aten.log"
    assert time.perf_counter() - start < 30  # quadratic cost would take minutes; the bound is wide for slow machines


def test_producers_tell_regions_of_one_storage_apart() -> None:
    producers, base = Producers(), torch.zeros(2, 3)
    first, second = object(), object()
    base[0] = math.inf
    producers.add(base[0], first)  # type: ignore[arg-type]
    base[1, 1] = math.nan
    producers.add(base[1], second)  # type: ignore[arg-type]
    assert producers.of(base[1]) == [second]
    assert producers.of(base[:, 0]) == [first]
    assert set(producers.of(base.t())) == {first, second}
    base[1] = math.inf
    third = object()
    producers.add(base[1], third)  # type: ignore[arg-type]
    assert producers.of(base[1]) == [third]
    base[0] = 0.0
    producers.forget_healed(base)
    assert producers.of(base) == [third]


def test_own_files_and_torch_are_never_the_users() -> None:
    assert owner(torch.nn.functional.__file__) == "torch"
    assert owner(trace.__code__.co_filename) == "own"
    assert owner(pytest.__file__) == "library"
    assert owner(__file__) == "user"


def test_traceback_text_is_read() -> None:
    text = ['  File "a.py", line 3, in <module>\n    f()\n', '  File "/b c/d.py", line 41, in forward\n    x.log()\n']
    assert [(place.path, place.line) for place in parse_traceback(text)] == [("a.py", 3), ("/b c/d.py", 41)]


@pytest.mark.parametrize(
    ("operation", "dtype", "arguments", "words"),
    [
        ("aten._ctc_loss", torch.float32, {}, "zero_infinity"),
        ("aten.fmod", torch.float32, {"other": 0.0}, "divides by 0"),
        ("aten.linalg_inv_ex", torch.float32, {}, "singular"),
        ("aten.somewhat_new", torch.float32, {}, "min 0 and max 2"),
    ],
)
def test_remedy_fits_the_operation(operation: str, dtype: torch.dtype, arguments: dict[str, Any], words: str) -> None:
    damage = Damage("inf", 1, 4, (0,), (4,), dtype)
    operands = (Operand("self", (4,), dtype, 0.0, 2.0, 0, 2.0),)
    facts = Facts(operation, "forward", None, operands, arguments, damage)
    assert words in " ".join(explain(facts))
