"""NaN, infinity and constant inputs: found with column and sample, silent on the mended twins."""

import math

import pytest
import torch
from preflight.checking import (
    alarms,
    classifier,
    convnet,
    data_check,
    groups,
    loader_of,
    pictures,
    regressor,
    silent,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TestNonfinite:
    def test_names_column_count_and_first_sample(self, tmp_path):
        inputs, labels = groups()
        bad = inputs.clone()
        bad[[41, 7], 3] = math.nan
        result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(bad, labels, shuffle=False))
        assert alarms(result) == [("data.nonfinite", "error")]
        assert "NaN in input (column 3): 2 of the 300 training samples" in result.findings[0].evidence
        assert "sample 7 of the data set" in result.findings[0].evidence
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, labels)))

    def test_infinite_pictures_and_held_out_data(self, tmp_path):
        images, labels = pictures()
        dark = images.clone()
        dark[:, 0, 7] = 0
        good, bad = loader_of(torch.log1p(dark), labels), loader_of(torch.log(dark), labels)
        other = loader_of(torch.log1p(pictures(seed=1)[0]), labels)
        assert ("data.nonfinite", "error") in alarms(data_check(tmp_path, convnet(), nn.CrossEntropyLoss(), bad, other))
        result = data_check(tmp_path, convnet(), nn.CrossEntropyLoss(), other, bad)
        assert alarms(result) == [("data.nonfinite", "error")]
        assert "validation" in result.findings[0].evidence
        assert silent(data_check(tmp_path, convnet(), nn.CrossEntropyLoss(), good, other))

    @pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.HuberLoss()])
    def test_targets_that_the_loss_gets(self, tmp_path, loss_fn):
        inputs, _ = groups()
        target = inputs[:, :1] - inputs[:, 1:2]
        bad = target.clone()
        bad[5] = math.nan
        assert alarms(data_check(tmp_path, regressor(), loss_fn, loader_of(inputs, bad)))[0][0] == "data.nonfinite"
        assert silent(data_check(tmp_path, regressor(), loss_fn, loader_of(inputs, target)))

    def test_a_program_that_copes_is_told_of_no_more(self, tmp_path):
        """Missing targets, which the loss leaves out."""
        inputs, _ = groups()
        target = inputs[:, :1] - inputs[:, 1:2]
        target[::3] = math.nan

        def loss_fn(output, target):
            known = ~target.isnan()
            return (output[known] - target[known]).square().mean()

        result = data_check(tmp_path, regressor(), loss_fn, loader_of(inputs, target))
        assert silent(result)
        assert [str(finding.severity) for finding in result.findings] == ["info"]

    def test_a_mask_of_minus_infinity_is_meant(self, tmp_path):
        tokens = torch.randint(20, (64, 6))
        mask = torch.zeros(64, 6)
        mask[:, 4:] = -math.inf

        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

            def forward(self, batch):
                tokens, mask = batch
                return self.head((mask.softmax(1).unsqueeze(2) * self.embed(tokens)).sum(1))

        pairs = [((t, m), (t[0] > 9).long()) for t, m in zip(tokens, mask, strict=True)]
        loader = DataLoader(pairs, batch_size=8, shuffle=True)
        assert silent(data_check(tmp_path, Masked(), nn.CrossEntropyLoss(), loader))


class TestConstant:
    def test_pictures_cut_to_zero(self, tmp_path):
        images, labels = pictures()
        blank = (0.9 * images / images.max()).to(torch.uint8).float()
        result = data_check(tmp_path, convnet(), nn.CrossEntropyLoss(), loader_of(blank, labels))
        assert alarms(result) == [("data.constant_input", "error")]
        assert "0 everywhere" in result.findings[0].evidence
        assert silent(data_check(tmp_path, convnet(), nn.CrossEntropyLoss(), loader_of(images, labels)))

    def test_the_same_sample_each_time(self, tmp_path):
        inputs, labels = groups()

        class First(Dataset):
            def __init__(self, mended):
                self.mended = mended

            def __len__(self):
                return len(inputs)

            def __getitem__(self, index):
                return inputs[index if self.mended else 0], labels[index]

        for mended in (False, True):
            loader = DataLoader(First(mended), batch_size=10, shuffle=True)
            result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader)
            assert silent(result) if mended else alarms(result) == [("data.constant_input", "error")]

    def test_most_files_unreadable(self, tmp_path):
        inputs, labels = groups(400)
        lost = inputs.clone()
        lost[torch.arange(400) % 50 != 0] = 0
        result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(lost, labels))
        assert ("data.constant_input", "error") in alarms(result)

    def test_one_constant_column_is_no_fault(self, tmp_path):
        inputs, labels = groups()
        inputs[:, 2] = 1
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, labels)))
