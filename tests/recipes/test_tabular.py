import torch

from safe_trainer.recipes.tabular import breast_cancer


def test_rows_are_normalised_over_the_training_part():
    data = breast_cancer()
    assert [len(data[part]) for part in ("train", "val", "test")] == [399, 85, 85]
    rows, labels = data["train"].tensors
    assert rows.shape[1] == 30
    assert torch.allclose(rows.mean(0), torch.zeros(30), atol=1e-4)
    assert torch.allclose(rows.std(0), torch.ones(30), atol=1e-4)
    assert labels.unique().tolist() == [0, 1]
    assert data["num_classes"] == 2
