"""Tables for whoever debugs a network by hand: common bugs, symptoms, a decision tree, a checklist. Data only.

`docs/debugging-checklist.md` and `docs/debugging-prompt.md` are made from it; the ids are those of `catalogue`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUGS", "CHECKLIST", "SYMPTOMS", "TREE", "Bug", "Fork", "Symptom"]


@dataclass(frozen=True)
class Bug:
    """A mistake that many make."""

    mistake: str
    symptom: str
    mend: str
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Symptom:
    """What one sees, and where to begin."""

    seen: str
    causes: str
    first: str
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fork:
    """A question of the decision tree: where each answer leads, another question's name or a sentence."""

    name: str
    question: str
    answers: tuple[tuple[str, str], ...]


BUGS = (
    Bug(
        "`optimizer.zero_grad()` forgotten",
        "steps use sums of old gradients; the loss swings or climbs",
        "call it once for each `optimizer.step()`: before backward, or right after the step",
        ("gradient.accumulating",),
    ),
    Bug(
        "`model.eval()` forgotten in evaluation",
        "Dropout and BatchNorm behave as in training; the figures vary from run to run",
        "`model.eval()`, evaluate under `torch.no_grad()`, and `model.train()` after it: no_grad changes no mode",
        ("model.eval_missing", "model.stuck_in_eval"),
    ),
    Bug(
        "wrong tensor shapes",
        "two tensors are stretched against each other in silence, and the loss settles at the spread of the targets",
        "let the shapes of output and target be equal; assert it in the loss",
        ("loss.broadcast", "model.batch_mixing"),
    ),
    Bug(
        "model and data on different devices",
        "`expected all tensors to be on the same device`",
        "move both with `.to(device)`; tensors made in forward take `device=x.device`, constants are buffers",
    ),
    Bug(
        "a loss or an output kept with its graph",
        "memory grows with each step until it is full",
        "`loss.item()` or `loss.detach()` for what is kept; `torch.no_grad()` in evaluation",
        ("memory.graph_retained",),
    ),
    Bug(
        "an in-place operation on what backward needs",
        "`modified by an inplace operation`",
        "`x = x + 1` in place of `x += 1`, or `x.clone()` first; ReLU(inplace=True) behind a convolution is fine",
    ),
    Bug(
        "inputs not standardised",
        "the loss is stuck at chance, or the first steps kill units",
        "subtract the training set's mean and divide by its deviation; the same figures for all splits",
        ("data.unnormalized", "activation.dead"),
    ),
    Bug(
        "labels of the wrong dtype",
        "`expected scalar type Long`, or, for a regression cast to integers, targets that are all zero",
        "class indices are `torch.long`, targets of a regression floats; do not cast before you have looked",
        ("loss.wrong_target_dtype", "data.label_range"),
    ),
    Bug(
        "softmax in front of CrossEntropyLoss",
        "the loss cannot fall below a floor (1.46 for ten classes), gradients are faint",
        "hand over raw scores",
        ("loss.double_softmax",),
    ),
    Bug(
        "layers in a plain Python list",
        "they never train, and are missing from checkpoints",
        "`nn.ModuleList`",
        ("model.unregistered_submodule",),
    ),
    Bug(
        "an optimizer built before the model was finished",
        "the new layers never move",
        "build it last; after `.to(device)` of an old PyTorch, too",
        ("optimizer.params_missing",),
    ),
    Bug(
        "a scheduler stepped at each batch that counts epochs",
        "the learning rate is gone after a few hundred steps",
        "step it once an epoch, or give it the number of batches",
        ("optimizer.scheduler_misuse",),
    ),
)

SYMPTOMS = (
    Symptom("the loss stays at ln(number of classes)", "the outputs say the same for every sample",
            "look at inputs and labels side by side; overfit one batch",
            ("data.label_misaligned", "data.constant_input", "optimizer.lr_too_low")),
    Symptom("NaN after some steps", "a learning rate that is too high, or an operation at the edge of its domain",
            "read the fuse's finding: it names the operation; then a tenth of the rate",
            ("forward.nonfinite", "gradient.nonfinite", "optimizer.lr_too_high")),
    Symptom("NaN at once", "log(0), a division by zero, or NaN in the data",
            "read the fuse's finding; an epsilon belongs where the zero is, not in an exponent",
            ("loss.log_of_zero", "data.nonfinite", "forward.nonfinite")),
    Symptom("the loss swings wildly", "a rate too high, batches too small, or gradients that add up",
            "look for zero_grad first, then lower the rate", ("gradient.accumulating", "optimizer.lr_too_high")),
    Symptom("the loss falls and then stands still", "a rate too high to settle, or a network too small",
            "a schedule (cosine, steps); then a wider network", ("training.plateau", "model.too_small")),
    Symptom("training good, held-out bad", "learnt by heart, or evaluated in the wrong mode",
            "check model.eval(); then stop early, augment, regularise",
            ("training.overfitting", "model.eval_missing", "model.norm_stats")),
    Symptom("both at chance", "nothing is learnt at all", "overfit one batch",
            ("gradient.missing", "optimizer.params_missing", "optimizer.step_missing")),
    Symptom("both equal and low", "a network that is too small", "more units or layers, better features",
            ("model.too_small",)),
    Symptom("gradients are all zero", "dead rectifiers, or a graph that is cut",
            "look for detach, .data, no_grad; look at the units", ("gradient.missing", "activation.dead")),
    Symptom("out of memory after a while", "graphs that are kept", "loss.item(); torch.no_grad() in evaluation",
            ("memory.graph_retained",)),
    Symptom("held-out better than it can be", "the test has leaked into training",
            "look for samples in both, and columns made from the label", ("data.split_overlap", "data.target_leak")),
)  # fmt: skip

TREE = (
    Fork("loss", "Does the loss fall?", (("no, it is NaN", "nonfinite"), ("it climbs or swings", "rate"),
                                         ("no, it stands still", "batch"), ("yes", "held_out"))),
    Fork("nonfinite", "What does the fuse name?", (
        ("an operation", "mend it where it stands: data.nonfinite, loss.log_of_zero, forward.nonfinite"),
        ("an operation of backward", "sqrt, norm or where at 0: gradient.nonfinite"),
        ("growth over many layers", "normalise, clip: activation.exploding, gradient.exploding"))),
    Fork("rate", "Are gradients cleared at each step?", (
        ("no", "clear them: gradient.accumulating"),
        ("yes", "a tenth of the rate, a warm-up: optimizer.lr_too_high"))),
    Fork("batch", "Can one batch of 8 to 32 samples be learnt by heart?", (("yes", "data"), ("no", "gradients"))),
    Fork("gradients", "Do all parameters get gradients, and move?", (
        ("none, or zero", "a cut graph, dead units: gradient.missing, activation.dead"),
        ("gradients, but no movement", "optimizer.params_missing, optimizer.step_missing, optimizer.lr_too_low"),
        ("tiny in the first layers", "gradient.vanishing, activation.saturated"),
        ("yes", "the loss is not what you think, or the network too small: loss.double_softmax, loss.broadcast, "
                "model.too_small"))),
    Fork("data", "Do labels belong to their inputs?", (
        ("no", "data.label_misaligned"),
        ("yes, but inputs are raw", "data.unnormalized"),
        ("yes", "more time, another rate, a wider network"))),
    Fork("held_out", "Is held-out data as good as training data?", (
        ("yes", "done; test once, at the very end"),
        ("better than it can be", "data.split_overlap, data.target_leak"),
        ("no, and it varies from run to run", "model.eval_missing, model.non_deterministic_eval"),
        ("no", "training.overfitting, model.norm_stats"))),
)  # fmt: skip

CHECKLIST = (
    "Look at five samples with their labels, as the network gets them.",
    "The first loss is what chance gives: ln(number of classes), or the variance of the targets.",
    "Shapes of output and target are those that the loss wants; no softmax in front of CrossEntropyLoss.",
    "All parameters that should train get a gradient, are in the optimizer once, and move.",
    "One batch of 8 to 32 samples can be learnt by heart.",
    "Backward passes written by hand agree with finite differences: a relative error below 1e-5 in float64 is right, "
    "above 1e-3 a bug.",
    "The learning rate comes from a range test, or from the same network elsewhere.",
    "Evaluation is in eval mode, under no_grad, and gives the same figures twice.",
    "No sample is in two splits; the test set selects nothing.",
    "A short run: the loss falls, no layer is dead or flat, updates are about a thousandth of the weights.",
)
