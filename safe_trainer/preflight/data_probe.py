"""Whether labels say anything about their inputs: cheap probes of scikit-learn's, cross-validated. Reads tables only.

Nothing is concluded from probes that find nothing: hard tasks look like that. It takes the neighbour's labels that fit,
held-out data that do show a relation, or clear groups in the inputs that no label follows.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from safe_trainer.findings import Finding
from safe_trainer.preflight.clock import Clock
from safe_trainer.preflight.data_loss import Labels
from safe_trainer.preflight.data_samples import Table
from safe_trainer.preflight.outcome import finding

SAMPLES = 1500
"""Samples that a probe gets at most: a tenth of a second each."""
FEWEST = 60
"""Samples below which a probe says nothing."""
ENOUGH = 300
"""Training samples that a probe must have failed on before others are asked; a weak relation shows on so many."""
FEATURES = 256
"""Features that a probe gets at most; more are mixed at random, which keeps distances."""
WORDS = 512
"""Places of the bag of words that token ids become."""
RELATED = 5.0
"""Standard deviations above permuted labels from which a relation is certain."""
UNRELATED = 2.5
"""Standard deviations below which a probe has found nothing."""
NEIGHBOURS = 5
GAIN = 0.15
"""What a probe must win over permuted labels on held-out data before its silence on training data is a fault."""
GROUPED = 0.06
"""How much more the inputs must fall into groups (silhouette) than Gaussian noise of the same covariance does."""
MOST_CLASSES = 50
LOPSIDED = 0.6
"""Chance of two samples to have the same class from which probes answer with the common one, whatever the inputs."""


def misaligned(
    table: Table, held_out: Table, labels: Labels | None, quantity: tuple[str, Tensor] | None, clock: Clock
) -> list[Finding]:
    """Labels of other samples: those of the neighbour, or anybody's."""
    goal = _goal(labels, quantity)
    features = features_of(table)
    if goal is None or features is None or len(features) < FEWEST or len(features) != len(goal[1]):
        return []
    name, values, classes = goal
    order = _dataset_order(table)
    x, y = features[order][:SAMPLES], values[order][:SAMPLES]
    if len(np.unique(y)) < 2 or (classes and not _is_balanced(y)):
        return []
    found = _relation(x, y, classes)
    if found[0] > RELATED:
        return []
    shifted = _shifted(name, x, y, classes, found, order)
    if shifted is not None:
        return [shifted]
    forest = _forest(x, y, classes)
    if max(found[0], forest) > UNRELATED or len(x) < ENOUGH or clock.left() == 0:
        return []
    return _unrelated(name, x, y, classes, max(found[0], forest), held_out, labels)


def _is_balanced(y: np.ndarray) -> bool:
    """Whether a probe could show that it has learnt more than the common class."""
    shares = np.unique(y, return_counts=True)[1] / len(y)
    return len(shares) <= MOST_CLASSES and float((shares**2).sum()) < LOPSIDED


def _goal(labels: Labels | None, quantity: tuple[str, Tensor] | None) -> tuple[str, np.ndarray, bool] | None:
    """Name and values of the target, and whether they are classes."""
    if labels is not None:
        return labels.field, labels.values.numpy(), True
    if quantity is None or not bool(torch.isfinite(quantity[1]).all()) or not float(quantity[1].std()):
        return None
    return quantity[0], quantity[1].double().numpy(), False


def features_of(table: Table) -> np.ndarray | None:
    """One row of standardised numbers a sample; None where inputs are no plain numbers."""
    values = table.only_input()
    if values is None or values.numel() < len(values):
        return None
    if not values.is_floating_point():
        if values.dim() != 2 or values.dtype is torch.bool:
            return None
        words = torch.zeros(len(values), WORDS)
        words.scatter_add_(1, values.long() % WORDS, torch.ones(values.shape))
        return _standardised(words)
    flat = values.reshape(len(values), -1).float()
    if not bool(torch.isfinite(flat).all()):
        return None
    if flat.shape[1] > FEATURES:
        mixing = torch.randn(flat.shape[1], FEATURES, generator=torch.Generator().manual_seed(0))
        flat = flat @ mixing
    return _standardised(flat)


def _standardised(flat: Tensor) -> np.ndarray:
    deviation = flat.std(0, unbiased=False)
    return ((flat - flat.mean(0)) / torch.where(deviation > 0, deviation, torch.ones(()))).numpy()


def _dataset_order(table: Table) -> np.ndarray:
    """Rows in the order of the data set, each sample once; as they were read where the sampler does not tell."""
    if len(table.indices) != len(table) or not all(isinstance(index, int) for index in table.indices):
        return np.arange(len(table))
    return np.unique(np.array(table.indices), return_index=True)[1]


# --- probes: each gives standard deviations above chance ------------------------------------------------------------


def _relation(x: np.ndarray, y: np.ndarray, classes: bool) -> tuple[float, float]:
    """The better of nearest neighbours and a linear model: deviations above permuted labels, and what it wins."""
    first = _deviations(_by_neighbours(x, y, classes), y, classes)
    if first[0] > RELATED:
        return first
    return max(first, _deviations(_by_lines(x, y, classes), y, classes))


def _deviations(guess: np.ndarray, y: np.ndarray, classes: bool) -> tuple[float, float]:
    """How far the guesses are better than the same guesses for permuted labels, in standard deviations and as such."""
    if not classes:
        if np.std(guess) == 0 or not np.isfinite(guess).all():
            return 0.0, 0.0
        correlation = float(np.clip(np.corrcoef(guess, y)[0, 1], -0.999999, 0.999999))
        return math.atanh(correlation) * math.sqrt(len(y) - 3), max(0.0, correlation) ** 2
    kinds = np.unique(y)
    chance = float(sum((guess == kind).mean() * (y == kind).mean() for kind in kinds))
    right = float((guess == y).mean())
    return (right - chance) / math.sqrt(max(chance * (1 - chance), 1e-9) / len(y)), right - chance


def _by_neighbours(x: np.ndarray, y: np.ndarray, classes: bool) -> np.ndarray:
    """What the nearest others say of each sample."""
    points = torch.from_numpy(x)
    near = torch.cdist(points, points).fill_diagonal_(math.inf).topk(min(NEIGHBOURS, len(x) - 1), largest=False)
    votes = torch.from_numpy(y)[near.indices]
    return (votes.mode(1).values if classes else votes.mean(1)).numpy()


def _by_lines(x: np.ndarray, y: np.ndarray, classes: bool) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression, Ridge

    return _crossed(LogisticRegression(C=0.1, max_iter=60) if classes else Ridge(alpha=10.0), x, y)


def _forest(x: np.ndarray, y: np.ndarray, classes: bool) -> float:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    kind = RandomForestClassifier if classes else RandomForestRegressor
    guess = _crossed(kind(n_estimators=30, min_samples_leaf=3, max_features="sqrt", random_state=0), x, y)
    return _deviations(guess, y, classes)[0]


def _crossed(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Guesses for each sample of a model that has seen the other two thirds."""
    from sklearn.model_selection import KFold, cross_val_predict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that are rare, steps that end before convergence
        folds = KFold(3, shuffle=True, random_state=0)
        return np.asarray(cross_val_predict(model, x, y, cv=folds))


# --- conclusions ----------------------------------------------------------------------------------------------------


def _shifted(
    name: str, x: np.ndarray, y: np.ndarray, classes: bool, found: tuple[float, float], order: np.ndarray
) -> Finding | None:
    """The labels fit when they are moved by one place."""
    if found[0] > UNRELATED + 0.5:
        return None
    for offset in (1, -1):
        moved = np.roll(y, offset)
        deviations, gain = _relation(x, moved, classes)
        if deviations > RELATED + 1 and gain > max(0.1, 3 * found[1]):
            whose = "behind" if offset == -1 else "before"
            return _found(
                name,
                f"no probe learns the labels of {len(x):,} samples ({found[0]:.1f} standard deviations above permuted "
                f"labels), and the label of the sample one place {whose} each fits it ({deviations:.1f} deviations)",
                "inputs and labels are off by one row: a header, a dropped first row, a join on the wrong index",
                "pair them by a key in place of their position, and look at twenty samples with their labels",
            )
    return None


def _unrelated(
    name: str, x: np.ndarray, y: np.ndarray, classes: bool, deviations: float, held_out: Table, labels: Labels | None
) -> list[Finding]:
    """Nothing was found: whether something must have been."""
    start = (
        f"nearest neighbours, a linear model and a random forest learn nothing from {len(x):,} samples "
        f"({deviations:.1f} standard deviations above permuted labels at best)"
    )
    cause = "inputs and labels were shuffled or sorted apart"
    remedy = "shuffle indices, not arrays; look at twenty samples with their labels"
    other = _held_out_relation(name, held_out, classes, labels)
    if other is not None:
        return [_found(name, f"{start}, and the held-out samples do show a relation ({other})", cause, remedy)]
    if classes and len(np.unique(y)) >= 3:
        more = _groups(x, len(np.unique(y)))
        if more > GROUPED:
            evidence = f"{start}, although the inputs fall into clear groups (silhouette {more:.2f} above noise's)"
            return [_found(name, evidence, cause, remedy)]
    return []


def _held_out_relation(name: str, held_out: Table, classes: bool, labels: Labels | None) -> str | None:
    features = features_of(held_out) if len(held_out) >= FEWEST else None
    if features is None:
        return None
    if labels is not None:
        y = None if labels.held_out is None else labels.held_out.numpy()
    else:
        whole = held_out.whole(name)
        y = None if whole is None or whole.numel() != len(whole) else whole.reshape(-1).double().numpy()
    if y is None or len(y) != len(features) or len(np.unique(y)) < 2:
        return None
    deviations, gain = _relation(features[:SAMPLES], y[:SAMPLES], classes)
    return f"{deviations:.1f} deviations" if deviations > RELATED and gain > GAIN else None


def _groups(x: np.ndarray, count: int) -> float:
    """How much more clearly the inputs fall into as many groups as there are classes than Gaussian noise would."""
    x = x[:600]
    covariance = np.cov(x.T) + 1e-6 * np.eye(x.shape[1])
    noise = np.random.RandomState(0).multivariate_normal(x.mean(0), covariance, len(x)).astype(np.float32)
    return _silhouette(x, count) - _silhouette(noise, count)


def _silhouette(x: np.ndarray, count: int) -> float:
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    groups = KMeans(count, n_init=2, random_state=0).fit_predict(x)
    return float(silhouette_score(x, groups)) if len(np.unique(groups)) > 1 else 0.0


def _found(name: str, evidence: str, cause: str, remedy: str) -> Finding:
    return finding(
        "data.label_misaligned",
        "warning",
        where=name,
        evidence=evidence,
        cause=cause,
        remedy=remedy,
    )
