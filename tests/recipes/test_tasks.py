import math

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss, mse_loss

from safe_trainer.recipes.tasks import Classification, NextToken, Reconstruction, Regression


class Sum(nn.Module):
    """Takes several inputs, by position or by name."""

    def forward(self, left, right=0):
        return left + right


def test_classification():
    scores, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    outcome = Classification()(nn.Identity(), [scores, target])
    assert outcome["loss"] == cross_entropy(scores, target)
    assert outcome["prediction"] is scores
    assert outcome["count"] == 4


def test_classification_with_one_score():
    scores, target = torch.randn(4, 1), torch.tensor([0, 1, 1, 0])
    outcome = Classification(binary_cross_entropy_with_logits)(nn.Identity(), [scores, target])
    assert outcome["loss"] == binary_cross_entropy_with_logits(scores[:, 0], target.float())
    assert outcome["prediction"].shape == target.shape
    assert outcome["target"] is target


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_regression(shape):
    predicted, target = torch.randn(shape), torch.randn(4)
    outcome = Regression(l1_loss)(nn.Identity(), [predicted, target])
    assert outcome["loss"] == l1_loss(predicted.view(4), target)
    assert outcome["prediction"].shape == (4,)


def test_regression_does_not_broadcast():
    with pytest.raises(ValueError, match=r"must have one shape \(got \(4, 2\) and \(4,\)\)"):
        Regression()(nn.Identity(), [torch.randn(4, 2), torch.randn(4)])


def test_next_token():
    embedding = nn.Embedding(5, 5)
    tokens = torch.randint(5, (3, 7))
    outcome = NextToken()(embedding, [tokens])
    expected = cross_entropy(embedding.weight[tokens[:, :-1].reshape(-1)], tokens[:, 1:].reshape(-1))
    assert torch.allclose(outcome["loss"], expected)
    assert outcome["count"] == 18
    assert outcome["bits_per_token"].item() == pytest.approx(expected.item() / math.log(2))
    assert not outcome["bits_per_token"].requires_grad


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x, torch.zeros(4)), lambda x: x, lambda x: {"input": x}])
def test_reconstruction_looks_at_the_input_alone(wrap):
    samples = torch.randn(4, 3)
    outcome = Reconstruction()(nn.ReLU(), wrap(samples))
    assert outcome["loss"] == mse_loss(samples.relu(), samples)
    assert outcome["target"] is samples


def test_dict_batches_reach_the_model_by_name():
    batch = {"left": torch.ones(4), "right": torch.ones(4), "height": torch.zeros(4)}
    assert Regression(target="height")(Sum(), batch)["loss"] == 4


def test_several_inputs_reach_the_model_in_order():
    assert Regression()(Sum(), (torch.ones(4), torch.ones(4), torch.zeros(4)))["loss"] == 4


@pytest.mark.parametrize(
    ("task", "batch", "sentence"),
    [
        (Classification(), {"input": torch.zeros(1)}, "must have the key 'target'"),
        (Classification(), [torch.zeros(1)], r"must be \(input, ..., target\)"),
        (NextToken(), {"text": torch.zeros(1)}, "must have the key 'tokens'"),
        (NextToken(), ["text"], "must be a tensor"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(task, batch, sentence):
    with pytest.raises(TypeError, match=sentence):
        task(nn.Identity(), batch)
