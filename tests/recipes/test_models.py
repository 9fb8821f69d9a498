import pytest
import torch

from safe_trainer.recipes.models import Autoencoder, LSTMClassifier, digits_cnn, mlp, resnet18_cifar


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (digits_cnn(), (2, 1, 8, 8), (2, 10)),
        (digits_cnn(num_classes=3, width=4, channels=3), (2, 3, 8, 8), (2, 3)),
        (mlp(30, 2), (2, 30), (2, 2)),
        (mlp(30, 2, hidden=[]), (2, 30), (2, 2)),
        (LSTMClassifier(8, 10), (2, 5, 8), (2, 10)),
        (LSTMClassifier(8, 10, layers=2, bidirectional=True), (2, 5, 8), (2, 10)),
        (Autoencoder(64), (2, 1, 8, 8), (2, 1, 8, 8)),
    ],
)
def test_shapes_and_gradients(model, shape, expected):
    output = model(torch.randn(shape))
    assert output.shape == expected
    output.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_resnet18_for_cifar_keeps_the_resolution_in_its_stem():
    model = resnet18_cifar(num_classes=7)
    stem = model.maxpool(model.relu(model.bn1(model.conv1(torch.randn(1, 3, 32, 32)))))
    assert stem.shape == (1, 64, 32, 32)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert sum(parameter.numel() for parameter in resnet18_cifar().parameters()) == 11_173_962


def test_an_lstm_reads_in_both_directions():
    model = LSTMClassifier(3, 4, bidirectional=True)
    sequence = torch.randn(1, 6, 3)
    output, (state, _) = model.lstm(sequence)
    read = torch.cat([output[:, -1, :64], output[:, 0, 64:]], dim=1)
    assert torch.allclose(model(sequence), model.head(read))
    assert state.shape == (2, 1, 64)


def test_an_autoencoder_squeezes_through_its_code():
    model = Autoencoder(64, code=3)
    assert model.encoder(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    output = model(100 * torch.randn(5, 64))
    assert output.min() >= 0
    assert output.max() <= 1
