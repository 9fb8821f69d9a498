"""Labels that are likely wrong, asked for by `preflight.label_noise`. Reads tables; needs the extra label-noise.

Out-of-fold self-confidence (Northcutt, Jiang and Chuang, "Confident learning: estimating uncertainty in dataset
labels", 2021) as cleanlab has it, over probabilities that a simple model gives to samples which it has not seen.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from safe_trainer.findings import Finding
from safe_trainer.preflight.data_loss import Labels
from safe_trainer.preflight.data_probe import features_of
from safe_trainer.preflight.data_samples import Table
from safe_trainer.preflight.outcome import Skip, finding

FOLDS = 5
"""Parts of the cross-validation: each model learns from four fifths."""
FEWEST = 10
"""Samples of a class below which its probabilities say nothing."""
LEAST = 0.5
"""Accuracy of the probe above the most frequent class below which it cannot tell a wrong label from a hard one."""
DOUBTED = 0.1
"""Probability of the given label below which it is suspect. Cleanlab's own cut, the mean confidence of a class, leaves
out most wrong labels where classes lie far apart and that mean is close to 1."""
LISTED = 10
"""Samples that the evidence lists."""


def label_noise(table: Table, labels: Labels | None) -> list[Finding]:
    """The samples whose label a cross-validated model contradicts most confidently; an info, for somebody must look.

    Raises:
        Skip: cleanlab is not installed, the data are no table of numbers with classes, or no simple model learns them.
    """
    try:
        from cleanlab.filter import find_label_issues
    except ImportError as error:
        raise Skip("it needs cleanlab: pip install 'safe-trainer[label-noise]'") from error
    features = features_of(table)
    if labels is None or features is None or len(features) != len(labels.values):
        raise Skip("the batches are not one input of numbers and one class a sample")
    kinds, given, counts = np.unique(labels.values.numpy(), return_inverse=True, return_counts=True)
    if len(kinds) < 2 or counts.min() < FEWEST:
        raise Skip(f"each class needs {FEWEST} samples among those read")
    probabilities = _probabilities(features, given)
    accuracy, common = float((probabilities.argmax(1) == given).mean()), float(counts.max() / len(given))
    if accuracy < common + LEAST * (1 - common):
        raise Skip(f"no simple model learns these labels (accuracy {accuracy:.2f}), so none can contradict them")
    ranked = find_label_issues(
        given, probabilities, return_indices_ranked_by="self_confidence", filter_by="predicted_neq_given", n_jobs=1
    )
    suspects = ranked[probabilities[ranked, given[ranked]] < DOUBTED]
    if not len(suspects):
        return []
    listed = [
        f"{table.place(row)} has {kinds[given[row]]} and looks like {kinds[probabilities[row].argmax()]} "
        f"({probabilities[row].max():.2f})"
        for row in suspects[:LISTED].tolist()
    ]
    return [
        finding(
            "data.label_noise",
            "info",
            where=labels.field,
            evidence=f"{len(suspects):,} of {len(given):,} labels are likely wrong: {'; '.join(listed)}",
            cause="mistakes of those who labelled, or samples that are truly between two classes",
            remedy="look at these samples, most suspicious first, and correct or drop what is wrong",
        )
    ]


def _probabilities(features: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Of each class for each sample, by a model that has not seen it: the better of a linear and a local one."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    candidates = [
        _crossed(LogisticRegression(C=10.0, max_iter=300), features, given),
        _crossed(KNeighborsClassifier(10, weights="distance"), features, given),
    ]
    return max(candidates, key=lambda found: float((found.argmax(1) == given).mean()))


def _crossed(model: Any, features: np.ndarray, given: np.ndarray) -> np.ndarray:
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps that end before convergence
        return np.asarray(cross_val_predict(model, features, given, cv=folds, method="predict_proba"))
