"""One cycle for runs of any length, equal to PyTorch's wherever PyTorch's works."""

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from safe_trainer.recipes.schedules import one_cycle


def rates(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(seen) < steps else None
    return seen


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 40])
def test_it_is_pytorchs_where_that_works(steps):
    ours = rates(lambda o: one_cycle(o, 0.1, steps), steps)
    assert ours == rates(lambda o: OneCycleLR(o, 0.1, total_steps=steps, pct_start=0.25), steps)


def test_a_rise_of_exactly_one_step_works_where_pytorchs_divides_by_zero():
    with pytest.raises(ZeroDivisionError):
        rates(lambda o: OneCycleLR(o, 0.1, total_steps=4, pct_start=0.25), 4)
    seen = rates(lambda o: one_cycle(o, 0.1, 4), 4)
    assert seen[0] == pytest.approx(0.004)
    assert seen[-1] < 1e-5
    assert max(seen) <= 0.1
