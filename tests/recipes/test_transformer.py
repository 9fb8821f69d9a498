import pytest
import torch

from safe_trainer.recipes.transformer import Transformer


def small(**options):
    return Transformer(**{"vocabulary": 11, "block_size": 8, "width": 16, "layers": 2, "heads": 4, **options})


def test_no_place_sees_what_comes_after_it():
    model = small().eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_every_place_before_is_seen():
    model = small().eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 11
    assert not torch.allclose(model(tokens)[:, 7], model(changed)[:, 7])


def test_scores_and_embedding_share_their_weights():
    model = small()
    assert model.head.weight is model.token_embedding.weight
    model(torch.randint(11, (2, 8))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_untrained_model_guesses():
    loss = torch.nn.functional.cross_entropy(
        small()(torch.randint(11, (64, 8))).flatten(0, 1), torch.randint(11, (512,))
    )
    assert loss.item() == pytest.approx(torch.tensor(11.0).log().item(), rel=0.02)


def test_branches_that_add_up_start_smaller():
    model = small(width=64, layers=8)
    assert model.blocks[0].feed_forward[3].weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].attention[1].to_output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].feed_forward[1].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (model.norm.weight == 1).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"model\.width must be a multiple of model\.heads \(got 16 and 3\)"):
        small(heads=3)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        small()(torch.zeros(1, 9, dtype=torch.long))


def test_dropout_is_off_in_evaluation():
    model = small(dropout=0.5)
    tokens = torch.randint(11, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
