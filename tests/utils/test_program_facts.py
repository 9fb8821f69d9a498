"""Facts of a program: what a look sees, what it costs the program (nothing), and its parts on their own."""

import doctest

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from safe_trainer.utils import program_facts
from safe_trainer.utils.gradient_tracks import GradientTracks
from safe_trainer.utils.program_facts import ProgramFacts
from safe_trainer.utils.program_record import Record


def test_the_example_in_the_docstring_holds():
    assert doctest.testmod(program_facts).failed == 0


def run(model, optimizer, steps, step=None, **options):
    facts = ProgramFacts(model, [optimizer], **options)
    with facts:
        for number in range(1, steps + 1):
            with facts.looking(number):
                optimizer.zero_grad()
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
    return facts


def test_a_look_has_the_lengths_of_gradients_and_weights():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm()
    facts = run(model, optimizer, 1)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    (look,) = facts.record.looks
    assert look.norm_arrived == pytest.approx(gradient.item())
    assert look.norm_used == pytest.approx(gradient.item())
    assert look.norm_left is None
    assert look.weight_norm == pytest.approx(before.item())
    assert (look.stepped, look.arrived, look.present, look.nonzero, look.forwards) == (1, 2, 2, 2, 1)


def test_steps_that_are_due_come_in_pairs():
    facts = ProgramFacts(nn.Linear(2, 2), [])
    assert [step for step in range(1, 302) if facts.due(step)] == [1, 2, 10, 11, 30, 31, 100, 101, 200, 201, 300, 301]
    assert not any(ProgramFacts(nn.Linear(2, 2), [], every=0).due(step) for step in range(1, 302))


def test_other_steps_leave_no_hook_on_modules_parameters_or_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = ProgramFacts(model, [optimizer])
    with facts:
        for number in range(1, 9):
            with facts.looking(number):
                optimizer.zero_grad()
                model(torch.randn(6, 4)).mean().backward()
                optimizer.step()
                if number > 3:
                    assert sum(len(module._forward_hooks) for module in model.modules()) == 1
                    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
                    assert not optimizer._optimizer_step_pre_hooks


class NoTransfer(TorchDispatchMode):
    """Forbids what makes a host wait for its device."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        assert "_local_scalar_dense" not in str(function), "waits for the device"
        return function(*arguments, **(options or {}))


def test_a_look_waits_for_nothing_before_its_end():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = ProgramFacts(model, [optimizer])
    with facts:
        for number in range(1, 4):
            with facts.looking(number), NoTransfer():
                optimizer.zero_grad()
                model(torch.randn(6, 4)).mean().backward()
                optimizer.step()


def test_parameters_that_are_lazy_sparse_complex_or_shared_are_no_trouble():
    model = nn.ModuleDict(
        {"lazy": nn.LazyLinear(3), "sparse": nn.Embedding(9, 4, sparse=True), "whole": nn.Linear(3, 3)}
    )
    model["complex"] = nn.ParameterList([nn.Parameter(torch.randn(2, dtype=torch.complex64))])
    model["lazy"](torch.zeros(1, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = ProgramFacts(model, [optimizer])
    with facts:
        for number in range(1, 12):
            with facts.looking(number):
                optimizer.zero_grad()
                hidden = model["whole"](model["lazy"](model["sparse"](torch.tensor([1, 2, number % 9]))))
                (hidden.square().mean() + (model["complex"][0].abs() ** 2).sum()).backward()
                optimizer.step()
    assert facts.record.parameters["sparse.weight"].moved
    assert not facts.record.used_again
    assert facts.record.intervals > 0


def test_a_state_has_plain_types_and_goes_back():
    model = nn.Linear(4, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = ProgramFacts(model, [optimizer])
    with facts:
        for number in range(1, 12):
            with facts.looking(number):
                optimizer.zero_grad()
                model(torch.randn(6, 4).bfloat16()).square().mean().backward()
                optimizer.step()
    other = ProgramFacts(model, [optimizer])
    other.load_state_dict(facts.state_dict())
    assert other.record.state_dict() == facts.record.state_dict()
    assert Record.from_state(facts.record.state_dict()) == facts.record
    assert 0 <= facts.record.parameters["weight"].unchanged <= 1


def test_paused_is_not_part_of_the_program():
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts = run(model, optimizer, 2)
    before = facts.record.state_dict()
    with facts, facts.paused(), torch.no_grad():
        for _ in range(3):
            model(torch.randn(2, 4))
            optimizer.step()
    assert facts.record.state_dict() == before


@pytest.mark.parametrize("clears", ["none", "to zero", "to None"])
def test_tracks_tell_a_used_gradient_from_a_cleared_one(clears):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    told = []
    tracks = GradientTracks(lambda name: told.append(f"again {name}"), lambda: told.append("thrown"), lambda: None)
    optimizer.register_step_post_hook(lambda *_: tracks.moved(0))
    tracks.arm(1, [optimizer], {id(parameter): "p"})
    for _ in range(2):
        (parameter * 2).sum().backward()
        optimizer.step()
        if clears != "none":
            optimizer.zero_grad(set_to_none=clears == "to None")
    assert told == (["again p"] if clears == "none" else [])
    tracks.release()
    assert not parameter._backward_hooks
