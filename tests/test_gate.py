"""The norm that the fuse goes by: a number on a CPU, and the same as torch's."""

import math

import pytest
import torch

from safe_trainer.gate import all_finite, global_norm, norm_of


def gradients(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * scale for shape in ((3, 4), (5,), (2, 3, 4, 4), ())]


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e17])
def test_the_norm_on_the_host_is_torchs(scale):
    norm = norm_of(gradients(scale))
    assert isinstance(norm, float)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([g.double() for g in gradients(scale)]).item(), rel=1e-5)


@pytest.mark.parametrize(
    "odd",
    [
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4).half(),
        torch.randn(4).bfloat16(),
        torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (5,), check_invariants=True),
        torch.randn(4, dtype=torch.complex64),
        torch.nn.Parameter(torch.randn(3)).detach().expand(2, 3),
    ],
    ids=["channels_last", "transposed", "half", "bfloat16", "sparse", "complex", "expanded"],
)
def test_gradients_of_any_make_have_a_norm(odd):
    together = [torch.ones(3), odd]
    dense = odd.to_dense() if odd.is_sparse else odd
    wide = dense if dense.is_complex() else dense.double()
    assert float(norm_of(together)) == pytest.approx(math.hypot(math.sqrt(3), wide.norm().item()), rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_among_many_shows(bad):
    tensors = gradients()
    assert all_finite(tensors)
    tensors[2][1, 2, 3, 3] = bad
    assert not math.isfinite(norm_of(tensors))
    assert not all_finite(tensors)


def test_a_norm_beyond_the_number_range_is_no_bad_gradient():
    tensors = [torch.full((1000,), 3e38)]
    assert not torch.isfinite(global_norm(tensors))
    assert all_finite(tensors)
