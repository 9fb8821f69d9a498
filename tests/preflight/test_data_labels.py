"""Targets that do not fit their loss, and classes with hardly any samples."""

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
from torch.nn import functional
from torch.utils.data import WeightedRandomSampler


class TestRange:
    def test_classes_counted_from_one(self, tmp_path):
        inputs, labels = groups()
        result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, labels + 1))
        assert alarms(result)[0] == ("data.label_range", "error")
        assert "from 1 to 3" in result.findings[0].evidence
        assert "counted from 1" in result.findings[0].cause
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, labels)))

    def test_one_bad_label_far_behind(self, tmp_path):
        inputs, labels = groups(600)
        labels[555] = -1
        loader = loader_of(inputs, labels, shuffle=False)
        assert alarms(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader))[0][0] == "data.label_range"
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(ignore_index=-1), loader))
        labels[555] = -100
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader))

    @pytest.mark.parametrize("scale", [1, 255])
    def test_masks_of_pictures(self, tmp_path, scale):
        images, _ = pictures()
        masks = scale * (images > 0.5).float()
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
        result = data_check(tmp_path, model, nn.BCEWithLogitsLoss(), loader_of(images, masks))
        assert silent(result) if scale == 1 else alarms(result)[0] == ("data.label_range", "error")

    @pytest.mark.parametrize("mended", [False, True])
    def test_signs_for_a_binary_loss_of_ones_own(self, tmp_path, mended):
        inputs, labels = groups(classes=2)
        target = labels.float() if mended else 2.0 * labels - 1

        def step(model, loss_fn, optimizer, batch):
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        result = data_check(tmp_path, regressor(), None, loader_of(inputs, target), train_step=step)
        assert silent(result) if mended else alarms(result)[0] == ("data.label_range", "error")


class TestKind:
    @pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss()])
    def test_fractions_cut_off(self, tmp_path, loss_fn):
        inputs, _ = groups()
        target = torch.sigmoid(inputs[:, 0] - inputs[:, 1]) * 0.98

        def loss(output, target):
            return loss_fn(output.squeeze(1), target.float())

        result = data_check(tmp_path, regressor(), loss, loader_of(inputs, target.long()))
        assert ("loss.wrong_target_dtype", "error") in alarms(result)
        assert silent(data_check(tmp_path, regressor(), loss, loader_of(inputs, target)))

    def test_cut_between_batch_and_loss(self, tmp_path):
        inputs, _ = groups()
        target = 3 * torch.sigmoid(inputs[:, 0])

        def loss(output, target):
            return functional.mse_loss(output.squeeze(1), target.long().float())

        result = data_check(tmp_path, regressor(), loss, loader_of(inputs, target))
        assert alarms(result) == [("loss.wrong_target_dtype", "error")]

    def test_counts_are_whole_by_nature(self, tmp_path):
        inputs, _ = groups()
        counts = (3 * torch.sigmoid(inputs[:, 0])).round().long()
        loss = lambda output, target: functional.mse_loss(output.squeeze(1), target.float())  # noqa: E731
        assert silent(data_check(tmp_path, regressor(), loss, loader_of(inputs, counts)))

    def test_classes_as_floats(self, tmp_path):
        inputs, labels = groups()
        result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, labels.float()))
        assert alarms(result)[0] == ("loss.wrong_target_dtype", "error")
        soft = functional.one_hot(labels, 3).float() * 0.9 + 1 / 30
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, soft)))
        scores = 10 * soft
        result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, scores))
        assert alarms(result)[0] == ("loss.wrong_target_dtype", "error")


class TestMasked:
    def test_a_class_that_is_ignored(self, tmp_path):
        inputs, labels = groups()
        result = data_check(tmp_path, classifier(), nn.CrossEntropyLoss(ignore_index=0), loader_of(inputs, labels))
        assert alarms(result) == [("data.label_masked", "warning")]
        assert silent(data_check(tmp_path, classifier(), nn.CrossEntropyLoss(), loader_of(inputs, labels)))

    @pytest.mark.parametrize("padded", [False, True])
    def test_padding_that_is_a_word_too(self, tmp_path, padded):
        tokens = torch.randint(1 if padded else 0, 12, (120, 10), generator=torch.Generator().manual_seed(0))
        if padded:
            tokens[torch.arange(10) >= torch.randint(5, 11, (120, 1))] = 0
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
        loss = lambda output, target: functional.cross_entropy(  # noqa: E731
            output.flatten(0, 1), target.flatten(), ignore_index=0
        )
        result = data_check(tmp_path, model, loss, loader_of(tokens, (tokens * 5) % 12))
        assert silent(result) if padded else alarms(result) == [("data.label_masked", "warning")]

    def test_a_mask_with_one_class_left(self, tmp_path):
        images, _ = pictures()
        masks = (images[:, 0] > 0.5).long()
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        result = data_check(tmp_path, model, nn.CrossEntropyLoss(ignore_index=0), loader_of(images, masks))
        assert alarms(result) == [("data.label_masked", "warning")]
        masks[:, 0] = 255
        assert silent(data_check(tmp_path, model, nn.CrossEntropyLoss(ignore_index=255), loader_of(images, masks)))


def rare(every=40, classes=2, samples=800, spread=4.0):
    inputs, labels = groups(samples, classes=classes, spread=spread)
    keep = (labels != classes - 1) | (torch.arange(samples) % every == 0)
    return inputs[keep], labels[keep]


class TestBalance:
    @pytest.mark.parametrize("classes", [2, 4])
    def test_a_class_that_training_does_not_find(self, tmp_path, classes):
        inputs, labels = rare(classes=classes, samples=2000)
        loader = loader_of(inputs, labels)
        result = data_check(tmp_path, classifier(classes=classes), nn.CrossEntropyLoss(), loader, max_steps=100)
        assert alarms(result) == [("data.imbalance", "warning")]
        assert f"class {classes - 1} has" in result.findings[0].evidence

    def test_weights_or_a_sampler_make_up_for_it(self, tmp_path):
        inputs, labels = rare()
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 40.0]))
        assert silent(data_check(tmp_path, classifier(classes=2), loss, loader_of(inputs, labels), max_steps=100))
        sampler = WeightedRandomSampler(torch.where(labels == 1, 40.0, 1.0), len(labels))
        loader = loader_of(inputs, labels, shuffle=None, sampler=sampler)
        assert silent(data_check(tmp_path, classifier(classes=2), nn.CrossEntropyLoss(), loader, max_steps=100))

    def test_a_binary_loss(self, tmp_path):
        inputs, labels = rare()
        target = labels.float().unsqueeze(1)
        result = data_check(tmp_path, regressor(), nn.BCEWithLogitsLoss(), loader_of(inputs, target), max_steps=100)
        assert alarms(result) == [("data.imbalance", "warning")]
        loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([40.0]))
        assert silent(data_check(tmp_path, regressor(), loss, loader_of(inputs, target), max_steps=100))

    def test_a_rare_class_that_is_learnt_is_no_fault(self, tmp_path):
        inputs, labels = rare(spread=0.3)
        model = classifier(classes=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = loader_of(inputs, labels)
        assert silent(data_check(tmp_path, model, nn.CrossEntropyLoss(), loader, optimizer=optimizer, max_steps=200))


def test_a_network_for_pictures_is_silent(tmp_path):
    images, labels = pictures()
    val = loader_of(*pictures(seed=1))
    result = data_check(tmp_path, convnet(), nn.CrossEntropyLoss(), loader_of(images, labels), val)
    assert silent(result)
    assert "200 samples read, input (1, 8, 8) float32" in result.evidence
    assert "4 classes of" in result.evidence
