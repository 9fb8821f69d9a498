import os
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from safe_trainer.explain import explain
from safe_trainer.torch_messages import MESSAGES, OPERATIONS
from safe_trainer.utils.anomaly import AnomalyDetector, AnomalyError, validate_module

FLOATS = torch.rand(4, 3)


def line_of(code):
    """The number of the line of this file that has `code`, marked with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {code}"))
    return f"test_explain.py:{number}"


def raised(program):
    """The exception that a program ends in."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (any: the message is what matters)
        program()
    return caught.value


def pasted(program):
    """All that anomaly mode prints when a program fails under it, as a user would paste it: warning, then traceback."""
    with warnings.catch_warnings(record=True) as seen, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        error = raised(program)
    printed = [warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in seen]
    return "".join(printed) + "".join(traceback.format_exception(error))


# --- anomaly mode -----------------------------------------------------------------------------------------------------


class CustomActivation(nn.Module):
    """The customer's article: fails in float16 only."""

    def forward(self, x):
        return x * torch.exp(-(x**2))  # the activation


def activation_in_half_precision():
    x = torch.tensor([4e4], dtype=torch.float16, requires_grad=True)
    CustomActivation()(x).sum().backward()


def multiplication():
    weight = torch.zeros(2, requires_grad=True)
    y = weight * torch.tensor([float("inf"), 1.0])  # the multiplication
    (y * 0).sum().backward()


def test_the_article_s_activation():
    raw = pasted(activation_in_half_precision)
    explanation = explain(raw)
    assert explanation.title == "PowBackward0 gave NaN"
    assert line_of("the activation") in explanation.where
    assert "return x * torch.exp(-(x**2))" in explanation.where
    assert "65504" in explanation.cause
    assert "float32" in explanation.remedy
    assert "exponent cures nothing" in explanation.remedy


def test_the_article_s_claim_does_not_hold_in_single_precision():
    x = torch.tensor([0.0, 1.0, 300.0, 1e18], requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        CustomActivation()(x).sum().backward()
    assert x.grad.isfinite().all()


def test_the_article_s_multiplication():
    explanation = explain(pasted(multiplication))
    assert explanation.title == "MulBackward0 gave NaN"
    assert line_of("the multiplication") in explanation.where
    assert "0 * inf" in explanation.cause
    assert "1st input" in explanation.what


def test_the_text_in_the_article_as_it_stands():
    explanation = explain(
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.\n \nStack trace:\n"
        '  File "model.py", line 42, in forward\n    return x * weight\n'
        '  File "train.py", line 101, in <module>\n    loss.backward()\n'
    )
    assert explanation.where == "forward at model.py:42 (return x * weight)"


def test_an_exception_alone_does_not_have_the_forward_line_and_the_remedy_says_so():
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        explanation = explain(raised(multiplication))
    assert explanation.where.startswith("test_explain.py:")
    assert "backward()" in explanation.where
    assert "prints it as a warning" in explanation.remedy


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def zeros():
    return torch.zeros(3, requires_grad=True)


def masked(operation):
    """A gradient of 0 through `operation` at 0: NaN where its derivative is infinite."""
    return lambda: (operation(zeros()) * 0).sum().backward()


OPERATIONS_THAT_FAIL = {
    "LogBackward0": (masked(torch.log), "log"),
    "SqrtBackward0": (masked(torch.sqrt), "root"),
    "DivBackward0": (lambda: (zeros() / zeros()).sum().backward(), "denominator"),
    "ReciprocalBackward0": (masked(torch.reciprocal), "denominator"),
    "PowBackward0": (lambda: ((zeros() - 1) ** 0.5).sum().backward(), "negative x with a fractional p"),
    "ExpBackward0": (masked(lambda x: torch.exp(x + 1000)), "88.7"),
    "MulBackward0": (multiplication, "0 * inf"),
    "LinalgVectorNormBackward0": (lambda: torch.linalg.vector_norm(zeros() + float("inf")).backward(), "inf / inf"),
    "SoftmaxBackward0": (lambda: (zeros() + float("-inf")).softmax(0)[0].backward(), "-inf throughout"),
    "LogSoftmaxBackward0": (lambda: (zeros() + float("-inf")).log_softmax(0)[0].backward(), "-inf throughout"),
    "Atan2Backward0": (lambda: torch.atan2(zeros(), zeros() + float("nan")).sum().backward(), "x**2 + y**2"),
    "StdBackward0": (lambda: (zeros()[:1] * 1).std().backward(), "single element"),
    "AcosBackward0": (masked(lambda x: torch.acos(x + 1)), "edge of its domain"),
    "WrongBackward": (lambda: Wrong.apply(zeros()).sum().backward(), "your backward()"),
}


@pytest.mark.parametrize("function", OPERATIONS_THAT_FAIL)
@pytest.mark.filterwarnings("ignore:std")
def test_each_operation_has_its_cause(function):
    program, words = OPERATIONS_THAT_FAIL[function]
    explanation = explain(pasted(program))
    assert explanation.title == f"{function} gave NaN"
    assert words in explanation.cause
    assert explanation.where.startswith("forward at test_explain.py:")
    assert explanation.where.count("torch/") == 0


def test_an_operation_that_is_not_in_the_table():
    explanation = explain("Function 'FancyBackward7' returned nan values in its 1th output.")
    assert "the 2nd input of Fancy" in explanation.what
    assert "0 * inf" in explanation.cause


def test_our_own_anomaly_error():
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x * 0)  # the root

    model = nn.Sequential(nn.Linear(2, 2), Root())
    detector = AnomalyDetector({"anomaly_detection": True, "anomaly": {"modules": ["1"]}}, model=model)

    def step():
        with detector:
            model(torch.ones(1, 2)).sum().backward()

    for program in (lambda: validate_module(model, torch.ones(1, 2)), step):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = raised(program)
        assert isinstance(error, AnomalyError)
        explanation = explain(error)
        assert "SqrtBackward0 gave" in explanation.title
        assert line_of("the root") in explanation.where
        assert "of module 1, SqrtBackward0" in explanation.what
        assert "square root" in explanation.what


# --- other errors, made by the torch that is installed ----------------------------------------------------------------


class Samples(Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.sample(index)


def in_place_on_a_leaf():
    w = torch.ones(2, requires_grad=True)
    w += 1


def in_place_on_a_saved_value():
    y = torch.exp(torch.ones(2, requires_grad=True))
    y += 1
    y.sum().backward()


def backward_twice():
    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


RAISED_BY_TORCH = {
    "in place, leaf": (in_place_on_a_leaf, "changed in place under autograd"),
    "in place, saved": (in_place_on_a_saved_value, "that backward needs was changed in place"),
    "twice": (backward_twice, "Backward ran twice"),
    "no grad": (lambda: torch.ones(2).sum().backward(), "not connected to any parameter"),
    "not a scalar": (lambda: (zeros() * 2).backward(), "not one number"),
    "float labels": (lambda: F.cross_entropy(FLOATS, torch.zeros(4)), "labels of the wrong type"),
    "int labels": (lambda: F.cross_entropy(FLOATS, torch.zeros(4, dtype=torch.int32)), "labels of the wrong type"),
    "label 10": (lambda: F.cross_entropy(FLOATS, torch.tensor([0, 1, 2, 10])), "label outside"),
    "batch sizes": (lambda: F.cross_entropy(FLOATS, torch.tensor([0, 1, 2])), "different number"),
    "token": (lambda: nn.Embedding(10, 3)(torch.tensor([10])), "outside a tensor or an embedding"),
    "row": (lambda: FLOATS[7], "outside a tensor or an embedding"),
    "float tokens": (lambda: nn.Embedding(10, 3)(torch.tensor([1.0])), "no whole numbers"),
    "features": (lambda: nn.Linear(3, 4)(torch.rand(2, 5)), "another number of features"),
    "channels": (lambda: nn.Conv2d(3, 4, 3)(torch.rand(2, 1, 8, 8)), "another number of channels"),
    "sizes": (lambda: torch.rand(3) + torch.rand(4), "do not go together"),
    "view": (lambda: torch.rand(3, 4).view(5), "does not fit"),
    "strides": (lambda: torch.rand(3, 4).t().view(12), "memory that is not in order"),
    "cat": (lambda: torch.cat([torch.rand(3, 4), torch.rand(3, 5)]), "cannot be joined"),
    "normalised channels": (lambda: nn.BatchNorm2d(3)(torch.rand(2, 4, 3, 3)), "does not fit"),
    "layer norm": (lambda: nn.LayerNorm(3)(torch.rand(2, 4)), "does not fit"),
    "collate": (lambda: list(DataLoader(Samples(lambda i: torch.ones(i + 1)), 2)), "different size in one batch"),
    "batch norm": (lambda: nn.BatchNorm1d(3)(torch.rand(1, 3)), "of a single value"),
    "double": (lambda: nn.Linear(3, 4)(torch.rand(2, 3).double()), "different types"),
    "double images": (lambda: nn.Conv2d(3, 4, 3)(torch.rand(2, 3, 8, 8).double()), "different types"),
    "bce labels": (lambda: F.binary_cross_entropy_with_logits(zeros(), torch.ones(3).long()), "does not fit its type"),
    "bce range": (lambda: F.binary_cross_entropy(torch.tensor([1.5]), torch.ones(1)), "probability outside"),
    "devices": (lambda: nn.Linear(3, 4)(torch.rand(2, 3, device="meta")), "different devices"),
    "memory": (lambda: torch.empty(1 << 50), "Out of memory on the CPU"),
}


@pytest.mark.parametrize("case", RAISED_BY_TORCH)
@pytest.mark.parametrize("form", ["exception", "text", "cause"])
def test_messages_of_the_installed_torch(case, form):
    program, words = RAISED_BY_TORCH[case]
    error = raised(program)
    if form == "text":
        error = "".join(traceback.format_exception(error))
    elif form == "cause":
        outer = ValueError("step 3 failed")
        outer.__cause__ = error
        error = outer
    explanation = explain(error)
    assert words in explanation.title
    assert form == "cause" or re.match(r"test_explain\.py:\d+ \(.+", explanation.where)
    assert_readable(explanation)


def assert_readable(explanation):
    text = str(explanation)
    filled = explanation.title + explanation.what
    assert not re.search(r"[{}]|\[\[|\]\]|  | [.,:;)]|: ?[.,]|\( \)", filled), filled
    assert text.count("\n") in (3, 4)
    for part in (explanation.what, explanation.cause, explanation.remedy):
        assert part.endswith("."), part


def test_figures_of_the_message_are_told():
    def what(case):
        return explain(raised(RAISED_BY_TORCH[case][0]))

    assert "the input has 5 features in its last dimension, the layer's weight takes 3" in what("features").what
    assert "in_features=5" in what("features").remedy
    assert "[2, 1, 8, 8] has 1 channels, the layer takes 3" in what("channels").what
    assert "3 and 4 elements in dimension 0" in what("sizes").what
    assert "the label 10 has no output" in what("label 10").what
    assert "torch.FloatTensor [2], the result of Exp (version 1, saved at version 0)." in what("in place, saved").what
    assert "tensor number 1 (from 0) has 5 where the first has 4" in what("cat").what
    assert "Double and Float" in what("double").what


def test_the_in_place_error_under_anomaly_mode_shows_the_forward_line():
    explanation = explain(pasted(in_place_on_a_saved_value))
    assert "that backward needs was changed in place" in explanation.title
    assert explanation.where.startswith("test_explain.py:")


def test_a_worker_that_dies():
    def die(_):
        os.kill(os.getpid(), 9)

    error = raised(lambda: list(DataLoader(Samples(die), num_workers=1, multiprocessing_context="fork")))
    explanation = explain(error)
    assert explanation.title == "A DataLoader worker died"
    assert_readable(explanation)


# --- errors that need a GPU, as PyTorch words them --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
            "cpu! (when checking argument for argument mat1 in method wrapper_CUDA_addmm)",
            "Tensors on different devices",
        ),
        (
            "Expected all tensors to be on the same device, but got weight is on cpu, different from other tensors on "
            "cuda:0 (when checking argument in method wrapper_CUDA__cudnn_convolution)",
            "Tensors on different devices",
        ),
        ("RuntimeError: expected CUDA tensor", "Tensors on different devices"),
        (
            "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
            "Tensors on different devices",
        ),
        (
            "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same "
            "or input should be a MKLDNN tensor and weight is a dense tensor",
            "Tensors on different devices",
        ),
        (
            "Expected object of device type cuda but got device type cpu for argument #1 'self' in call to _th_addmm",
            "Tensors on different devices",
        ),
        (
            "RuntimeError: Input type (torch.cuda.DoubleTensor) and weight type (torch.cuda.FloatTensor) should be "
            "the same",
            "Tensors of different types",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "23.69 GiB of which 1.12 GiB is free.",
            "Out of memory on the accelerator",
        ),
        ("RuntimeError: CUDA error: device-side assert triggered", "An assertion failed on the GPU"),
        ("RuntimeError: expected scalar type Long but found Float", "Class labels of the wrong type"),
        ("RuntimeError: expected scalar type Half but found Float", "Tensors of different types"),
        (
            "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory.",
            "A DataLoader worker died",
        ),
    ],
)
def test_messages_of_a_gpu_and_of_older_versions(text, title):
    explanation = explain(text)
    assert explanation.title == title
    assert_readable(explanation)


def test_a_size_or_device_in_the_message_is_told():
    assert "of 2.00 GiB" in explain("CUDA out of memory. Tried to allocate 2.00 GiB.").what
    assert (
        "cuda:0 and cpu"
        in explain(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        ).what
    )


# --- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["", "the cat sat on the mat", KeyError("loss"), ValueError()])
def test_an_unknown_error_is_said_to_be_unknown(error):
    explanation = explain(error)
    assert explanation.title == "Not a message that is known here"
    assert "unknown" in explanation.cause
    assert "anomaly_detection=true" in explanation.remedy
    assert explanation.where is None


def test_an_unknown_error_still_shows_the_users_line():
    def program():
        raise KeyError("loss")  # the key

    assert line_of("the key") in explain(raised(program)).where


def test_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="takes an exception or the text"):
        explain(3)


def test_frames_of_notebooks_and_of_windows():
    notebook = (
        "File ~/project/net.py:12, in Net.forward(self, x)\n     11 x = self.a(x)\nRuntimeError: expected CUDA tensor"
    )
    assert explain(notebook).where.startswith("net.py:12")
    cell = "Cell In[3], line 5\n      4 x = 1\n----> 5 model(x)\nRuntimeError: expected CUDA tensor"
    assert explain(cell).where.startswith("Cell In[3]:5")
    windows = 'File "C:\\proj\\net.py", line 7, in forward\n    return x + y\nRuntimeError: expected CUDA tensor'
    assert explain(windows).where == "net.py:7 (return x + y)"
    library = (
        'File "C:\\py\\Lib\\site-packages\\torch\\nn\\f.py", line 7, in linear\n    return x\nexpected CUDA tensor'
    )
    assert explain(library).where is None


def test_the_tables_are_sound():
    for message in MESSAGES:
        names = set(re.compile(message.pattern).groupindex)
        texts = message.title + message.what + message.cause + message.remedy
        assert set(re.findall(r"\{(\w+)\}", texts)) <= names
    for operation in OPERATIONS:
        re.compile(operation.names)
        assert set(re.findall(r"\{(\w+)\}", operation.does + operation.cause + operation.remedy)) <= {"name"}
