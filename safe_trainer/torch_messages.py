"""What PyTorch's errors mean: data for ``safe_trainer.explain``, no more than two tuples of texts.

``OPERATIONS`` says why the backward of an operation gives NaN, ``MESSAGES`` what the other errors mean. In the texts
``{name}`` stands for a group of the pattern that matched; a part in ``[[ ]]`` is left out if its group is empty.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A message that PyTorch is known to give: `pattern` is searched for, its named groups fill the texts."""

    pattern: str
    title: str
    what: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Operation:
    """Why the backward of some operations gives NaN. `names` is a regular expression without "Backward0"."""

    names: str
    does: str
    cause: str
    remedy: str


ANY_OPERATION = Operation(
    "",
    "{name}",
    "its backward met a combination without a value, such as 0 * inf, inf - inf or 0 / 0: either its inputs "
    "are at the edge of where it is differentiable, or an operation after it sent an infinite gradient, which "
    "anomaly mode lets pass.",
    "look at the least and greatest value of its inputs, and at what its result is used for; clamp the inputs, "
    "or run the training through the guard, which names the first operation that is not finite, infinities "
    "included.",
)

CUSTOM_OPERATION = Operation(
    "",
    "{name}, an autograd.Function of your own",
    "your backward() returned NaN: it divides by something that is 0, takes a root or logarithm there, or "
    "multiplies 0 by inf; or what it saved in forward was already infinite.",
    "check backward() with torch.autograd.gradcheck in float64, at the edges of its inputs, too.",
)

OPERATIONS = (
    Operation(
        "Log|Log2|Log10|Log1P|Xlogy|SpecialXlog1Py",
        "a logarithm",
        "the gradient of log(x) is g / x: at x = 0 it is infinite, and 0 / 0 = NaN where no gradient arrives "
        "(behind a mask or torch.where); a negative x has no logarithm at all.",
        "clamp the input, log(x.clamp(min=1e-8)), or work with log-probabilities: log_softmax, logsigmoid, log1p.",
    ),
    Operation(
        "Sqrt|Rsqrt",
        "a square root",
        "the gradient of sqrt(x) is g / (2 sqrt(x)): at x = 0 it is infinite, and 0 / 0 = NaN where no gradient "
        "arrives; a negative x, as rounding makes it, has no root.",
        "put the small number inside: sqrt(x + 1e-8); outside it comes too late. The same goes for distances and "
        "norms computed by hand.",
    ),
    Operation(
        "Div|Reciprocal|Remainder|TrueDivide|Addcdiv",
        "a division",
        "the denominator is 0 (the gradient is g / b for the numerator and -g * a / b**2 for the denominator), "
        "both are infinite, or b**2 is beyond the range; in float16 everything above 65504 is infinite: a mean "
        "over nothing and a vector scaled to length 1 are the usual places.",
        "keep the denominator off 0: x / y.clamp(min=1e-8), or x / (y + 1e-8) for y >= 0; count with .clamp(min=1).",
    ),
    Operation(
        "Pow",
        "a power",
        "the gradient of x**p is g * p * x**(p - 1): NaN for a negative x with a fractional p, infinite at x = 0 "
        "with p < 1, and where x**p or 2 * x overflows it is 0 * inf = NaN; in float16 everything above 65504 is "
        "infinite, so x**2 fails from x = 256 on. If the exponent is the one that learns, the gradient has log(x) "
        "in it: x must be positive.",
        "clamp the base to where the power is defined and finite; compute it in float32 (x.float(), or "
        "torch.autocast(device, enabled=False) around it). A small number added to the exponent cures nothing.",
    ),
    Operation(
        "Exp|Exp2|Expm1|Sinh|Cosh|SpecialExpm1",
        "an exponential",
        "exp(x) is infinite for x > 88.7 in float32 and x > 11.1 in float16, and its gradient is g * exp(x): where "
        "g is 0, 0 * inf = NaN.",
        "subtract the maximum first, or use softmax, logsumexp, log_softmax, expm1; else clamp x from above.",
    ),
    Operation(
        "LinalgVectorNorm|Norm|LinalgMatrixNorm|WeightNormInterface|Cdist|EuclideanDist|PairwiseDistance"
        "|CosineSimilarity",
        "a norm or distance",
        "the sum of squares overflowed (in float16 everything above 65504 is infinite), or the input was infinite "
        "already: inf / inf = NaN. At the zero vector and between equal points the gradient is 0 / 0; today's "
        "PyTorch puts 0 there for most norms, older versions and norms written out by hand do not.",
        "use the squared norm, or (x.square().sum(-1) + 1e-8).sqrt(); leave a point's distance to itself out.",
    ),
    Operation(
        "Mul|Addcmul",
        "a multiplication",
        "the gradient of each factor is the incoming gradient times the other factor, and 0 * inf = NaN: the other "
        "factor is infinite or NaN, or the gradient that came in is infinite while the factor is 0. The infinity "
        "was made elsewhere (exp, log, a division, an overflow: in float16 everything above 65504 is infinite); "
        "anomaly mode lets infinities pass until they meet a 0.",
        "look at both factors (torch.isfinite(x).all()) and go back to what made the infinite one; to mask, use "
        "torch.where or masked_fill on the input of the operation, not multiplication by 0.",
    ),
    Operation(
        "Softmax|LogSoftmax|SafeSoftmax|LogSumExp|Logsumexp|Logcumsumexp|.*DotProduct.*Attention.*|MaskedSoftmax",
        "a softmax",
        "a row is -inf throughout (all of it masked), or there is +inf or NaN in its input: the result is NaN, and "
        "the gradient with it.",
        "leave at least one place open in each row of the mask, or mask with a large negative number such as "
        "torch.finfo(x.dtype).min in place of -inf, and clear the result of empty rows; if nothing is masked, look "
        "at the size of the logits.",
    ),
    Operation(
        "Atan2|Angle|Hypot|Abs|Sgn",
        "an angle or absolute value",
        "at the origin the angle is undefined: the gradient divides by x**2 + y**2 = 0.",
        "keep the point off the origin: atan2(y, x + 1e-8), or mask it out on the input.",
    ),
    Operation(
        "Std|Var|StdMean|VarMean",
        "a standard deviation or variance",
        "over a single element the unbiased deviation is 0 / 0, or the input was infinite already. Where all "
        "elements are equal, the gradient of the deviation divides by it; today's PyTorch puts 0 there, older "
        "versions do not.",
        "use correction=0 for single elements, and (x.var(...) + 1e-8).sqrt() in place of x.std(...).",
    ),
    Operation(
        "Where|SWhere|MaskedFill|MaskedScatter|MaskedSelect|Clamp|ClampMin|ClampMax|Maximum|Minimum|NanToNum",
        "a selection",
        "selecting hides a bad number in forward but not its gradient: 0 (for what was not selected) times an "
        "infinite derivative is NaN. Or the incoming gradient itself is NaN.",
        "select on the input, before the dangerous operation: torch.log(torch.where(ok, x, 1.0)), then where again.",
    ),
    Operation(
        "Acos|Asin|Acosh|Asinh|Atanh|Erfinv|Logit|Tan",
        "an inverse or a function with poles",
        "at the edge of its domain (1 and -1 for acos and asin, 0 and 1 for logit) the derivative is infinite; "
        "beyond, as rounding makes it, there is no value.",
        "clamp the input to just inside: x.clamp(-1 + 1e-6, 1 - 1e-6).",
    ),
    Operation(
        "Prod|Cumprod|Cumsum|Sum|Mean|Nansum|Add|Sub|Rsub|Addmm|Mm|Bmm|Mv|Dot|Linear|Baddbmm|Einsum|Convolution"
        "|.*Conv.*",
        "a sum or product of many terms",
        "large terms of both signs overflow and inf - inf = NaN; or a factor, here a weight, an activation or the "
        "incoming gradient, is already infinite or NaN (in float16 everything above 65504 is infinite). A mean "
        "over nothing is 0 / 0.",
        "look at the greatest absolute value of input, weight and gradient: weights that grew point at the "
        "learning rate (lower it, clip the gradient); half precision needs a GradScaler, or bfloat16.",
    ),
    Operation(
        "NativeBatchNorm|CudnnBatchNorm|NativeLayerNorm|NativeGroupNorm|FusedRmsNorm|.*RmsNorm|.*BatchNorm.*",
        "a normalisation",
        "the variance is 0 with eps = 0 or too small for the precision, a channel has one element only, or the "
        "input is already infinite.",
        "keep eps at 1e-5 or more, normalise in float32, and use larger batches or GroupNorm.",
    ),
    Operation(
        "LinalgEigh|LinalgEig|LinalgSvd|Svd|LinalgQr|LinalgInvEx|LinalgSolveEx|LinalgCholeskyEx|LinalgDet"
        "|LinalgSlogdet",
        "a matrix decomposition or inverse",
        "the matrix is singular, or two of its eigenvalues or singular values are equal: the gradient divides by "
        "their difference.",
        "add a small multiple of the identity (of differing size along the diagonal for eigh and svd), use "
        "float64, or a loss that does not need the vectors.",
    ),
    Operation(
        "BinaryCrossEntropy|BinaryCrossEntropyWithLogits|NllLoss|NllLoss2D|NllLossNd|KlDiv|CtcLoss|Ctc.*|MseLoss"
        "|SmoothL1Loss",
        "a loss",
        "its input is at the edge (a probability of exactly 0 or 1), it is already infinite or NaN, or every "
        "target is ignored, so that the mean is 0 / 0.",
        "use the loss that takes logits (binary_cross_entropy_with_logits, cross_entropy), "
        "CTCLoss(zero_infinity=True), and leave out batches without a valid target.",
    ),
    Operation(
        "ToCopy|Copies|CopySlices|View|Reshape|Unsafeview|UnsafeView|Expand|T|Transpose|Permute|Slice|Select|Index"
        "|Cat|Stack",
        "{name}, which only moves or converts numbers",
        "the NaN came in from an operation after it; a conversion to float16 also makes infinities of everything "
        "above 65504.",
        "look at what its result is used for; the operation that made the NaN comes later in the forward, and is "
        "masked from anomaly mode if it was not run under it.",
    ),
)

MESSAGES = (
    Message(
        r"(?P<all>[^\n]*(?:got a finite gradient and gives a non-finite one|a gradient went bad in)[^\n]*)",
        "A module makes gradients that are not finite",
        "{all}.",
        "the module's backward has no finite value at these inputs: a root, logarithm or division at 0, or an "
        "overflow.",
        "look at the named operation's inputs; keep them off the edge (clamp, + eps inside), or compute in float32.",
    ),
    Message(
        "device-side assert triggered",
        "An assertion failed on the GPU",
        "a kernel on the GPU found an index out of its range, most often a class label or an embedding's index.",
        "labels outside 0 ... classes - 1 (an ignore value such as 255 or -1, counting from 1), or tokens beyond "
        "the vocabulary. Kernels run late: the line in the traceback is often not the one, and the process must be "
        "restarted.",
        "run the same batch on the CPU, which names index and line, or with CUDA_LAUNCH_BLOCKING=1; check "
        "labels.min() and labels.max() against the number of outputs.",
    ),
    Message(
        "(?P<where>CUDA out of memory|MPS backend out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|HIP out of memory)(?:.*?Tried to allocate (?P<size>[\d.]+ [KMGT]i?B))?",
        "Out of memory on the accelerator",
        "{where}: there was no room left for the next tensor[[ of {size}]].",
        "the batch is too large for the model; or graphs stay alive from step to step (a running sum of losses "
        "without .item() or .detach(), outputs kept in a list), so that the memory grows; or evaluation runs "
        "without torch.no_grad(); or another process holds the memory (nvidia-smi).",
        "if it fails in the first step: a smaller batch with accumulate, bf16, or activation checkpointing. If it "
        "fails later: total += loss.item(), .detach() whatever is kept, no_grad for evaluation.",
    ),
    Message(
        r"(?:DefaultCPUAllocator|not enough memory)[^\n]*?you tried to allocate (?P<bytes>\d+) bytes|std::bad_alloc"
        r"|\bMemoryError\b",
        "Out of memory on the CPU",
        "the system refused memory for a tensor[[ of {bytes} bytes]].",
        "a shape went wrong (a broadcast of (n, 1) with (n,) gives n * n elements; an outer product; one-hot of a "
        "large range), or the data or the batch does not fit.",
        "look at the shapes on the line; load data lazily in __getitem__; fewer workers, a smaller batch, no_grad "
        "for evaluation.",
    ),
    Message(
        r"DataLoader worker \(pid\(?s?\)? ?(?P<pid>[\d, ]+)\) (?:exited unexpectedly"
        r"|is killed by signal: (?P<signal>[^\n.]*))",
        "A DataLoader worker died",
        "the process {pid} that prepares batches ended without a word of its own[[ (signal: {signal})]].",
        "the system killed it for want of memory (each worker has a copy of the data set once Python touches it), "
        "shared memory is full (/dev/shm, small in a container: bus error), or native code in __getitem__ crashed.",
        "run with num_workers=0: an error then shows as itself. Else fewer workers, docker run --shm-size=8g, "
        "arrays in place of lists of Python objects, and dmesg for the system's reason.",
    ),
    Message(
        "Expected all tensors to be on the same device(?:.*?(?P<a>(?:cuda|cpu|mps|xpu"
        r"|meta)(?::\d+)?),? and (?P<b>(?:cuda|cpu|mps|xpu|meta)(?::\d+)?))?",
        "Tensors on different devices",
        "one operation got tensors from two devices[[, {a} and {b}]].",
        "a module's parameters or a tensor were not moved to the device of the others: tensors made in forward "
        "with torch.zeros(...) or torch.arange(...) and no device=, plain tensors kept in a module (neither "
        "Parameter nor buffer, so model.to() passes them by), layers in a Python list, or a batch that was not "
        "moved.",
        "move both, model.to(device) and batch.to(device) (x = x.to(device): it gives a copy); make tensors with "
        "device=x.device; register constants with register_buffer and layers in a ModuleList.",
    ),
    Message(
        "expected CUDA tensor|expected a CUDA tensor|Expected object of (?:device type"
        r"|backend) (?P<a>\w+) but got (?:device type|backend) (?P<b>\w+)|is not on the expected device (?P<c>\w+)"
        r"|Input type \((?:torch\.cuda|CUDA|MPS)[^)]*\) and (?:weight|bias) type \((?!torch\.cuda|CUDA|MPS)[^)]*\)"
        r"|Input type \((?!torch\.cuda|CUDA|MPS)[^)]*\) and (?:weight|bias) type \((?:torch\.cuda|CUDA|MPS)[^)]*\)",
        "Tensors on different devices",
        "an operation on one device got a tensor from another[[: {a} and {b}]][[, it wanted {c}]].",
        "a module's parameters or a tensor were not moved to the device of the others: tensors made in forward "
        "with torch.zeros(...) or torch.arange(...) and no device=, plain tensors kept in a module (neither "
        "Parameter nor buffer, so model.to() passes them by), layers in a Python list, or a batch that was not "
        "moved.",
        "move both, model.to(device) and batch.to(device) (x = x.to(device): it gives a copy); make tensors with "
        "device=x.device; register constants with register_buffer and layers in a ModuleList.",
    ),
    Message(
        "a leaf Variable that requires grad (?:is being used in|has been used in) an in-?place operation",
        "A parameter was changed in place under autograd",
        "an in-place operation (x += 1, x[...] = y, x.add_()) was applied to a parameter or another leaf that "
        "requires a gradient.",
        "autograd cannot record the change of a leaf: its old value would be lost.",
        "write x = x + 1; or, if it is meant as an update of the weights, put it under torch.no_grad().",
    ),
    Message(
        r"modified by an? in-?place operation(?::? \[(?P<tensor>[^\n]*?)\], which is output (?P<place>\d+) of "
        r"(?P<function>\w+), is at version (?P<now>\d+); expected version (?P<then>\d+))?",
        "A tensor that backward needs was changed in place",
        "a tensor that forward had saved for backward was overwritten before backward ran[[: {tensor}, the result "
        "of {function} (version {now}, saved at version {then})]].",
        "x += 1, x[...] = y, relu_(), ReLU(inplace=True) or a second update of the weights (optimizer.step() "
        "between forward and backward, as with two optimizers) after the value had been saved. sigmoid, tanh, exp, "
        "softmax and sqrt need their result, multiplication and convolution their inputs.",
        "replace x += 1 by x = x + 1, set inplace=False, or clone() first; call every backward() before any "
        "step(). Under anomaly mode a warning shows the forward line of the operation whose value was lost; the "
        "overwriting comes after.",
    ),
    Message(
        "backward through the graph a second time",
        "Backward ran twice through one graph",
        "the values that forward saved were freed by the first backward().",
        "something from the last step is still attached: a hidden state of an RNN, a memory, a running loss or a "
        "target network's output carried into the next step without .detach(); or a tensor computed once before "
        "the loop; or two losses that share a forward.",
        "detach what is carried over (h = h.detach()), recompute in each step, or add the losses and call "
        "backward() once; retain_graph=True only if both passes over one graph are meant.",
    ),
    Message(
        "does not require grad and does not have a grad_fn",
        "The loss is not connected to any parameter",
        "backward() was called on a tensor that no gradient can flow from.",
        "the graph is cut: forward ran under torch.no_grad() or inference_mode, .detach(), .item(), .numpy(), "
        "argmax, rounding or a comparison stands on the way, the loss was wrapped anew (torch.tensor(loss)), or "
        "all parameters are frozen.",
        "print x.requires_grad from the model's output on to the loss and look where it turns False.",
    ),
    Message(
        "grad can be implicitly created only for scalar outputs",
        "Backward on a loss that is not one number",
        "backward() was called on a tensor with several elements.",
        "the loss was not reduced (reduction='none'), or the output itself was taken for the loss.",
        "take loss.mean(), or .sum() if that is what you mean.",
    ),
    Message(
        r"Target (?P<label>-?\d+) is out of bounds",
        "A class label outside the model's range",
        "the label {label} has no output: labels must lie from 0 to the number of outputs - 1.",
        "labels that count from 1, a value that means ignore (255, -1), fewer outputs than classes, or text tokens "
        "beyond the vocabulary.",
        "check labels.min() and labels.max() against the last layer's size; shift them, set ignore_index, or widen it.",
    ),
    Message(
        "index out of range in self"
        r"|index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)",
        "An index outside a tensor or an embedding",
        "an index points at a row that is not there[[: {index}, where there are {size}]].",
        "a token, category or position beyond the embedding's num_embeddings (padding and unknown tokens count, "
        "too; a text longer than the table of positions), or a negative one.",
        "compare x.max() with num_embeddings - 1, and the sequence length with the number of positions.",
    ),
    Message(
        r"expected scalar type Long but found (?P<a>\w+)"
        r"|expected target dtype to be Long or Byte, but got (?P<b>\w+)"
        r"|nll_loss\w*. not implemented for '(?P<c>\w+)'",
        "Class labels of the wrong type",
        "cross_entropy and nll_loss take class numbers as int64 (Long) and got {a}{b}{c}.",
        "labels came from a float array, or from pandas or NumPy as int32; or the loss meant was another one.",
        "labels.long() for class numbers. Probabilities as targets are floats of the shape of the output; for yes "
        "or no use binary_cross_entropy_with_logits, for a quantity mse_loss.",
    ),
    Message(
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got "
        r"(?P<a>[\w.]+)",
        "An embedding got indices that are no whole numbers",
        "an embedding looks up rows by int64 numbers and got {a}.",
        "the whole batch was converted to float, tokens included.",
        "x.long() before the embedding; convert only what is measured, not what is counted.",
    ),
    Message(
        r"(?:expected scalar type (?P<a>\w+) but found (?P<b>\w+)"
        r"|must have the same dtype, but got (?P<c>\w+) and (?P<d>\w+)"
        r"|to have the same dtype, but got: (?P<e>\w+) != (?P<f>\w+)|Input type \((?P<g>[\w.]+)\) and (?:weight"
        r"|bias) type \((?P<h>[\w.]+)\) should be the same)",
        "Tensors of different types",
        "one operation got two number types: {a}{c}{e}{g} and {b}{d}{f}{h}.",
        "NumPy makes float64 (Double) where PyTorch has float32; integers or bytes from images were never "
        "converted; or half precision reaches a part that autocast does not cover.",
        "convert the input, x.float(), where the data is read; under mixed precision leave the conversion to "
        "torch.autocast, and do not call .half() on parts.",
    ),
    Message(
        r"result type (?P<a>\w+) can't be cast to the desired output type (?P<b>\w+)",
        "A result that does not fit its type",
        "the result is {a}, but it is to be stored as {b}.",
        "an in-place operation on whole numbers, or a loss that takes float targets got class numbers "
        "(binary_cross_entropy_with_logits).",
        "convert first: targets.float(), or x = x + y in place of x += y.",
    ),
    Message(
        "not implemented for '(?P<type>Half|BFloat16)'",
        "An operation that this device has not in half precision",
        "there is no {type} version of the operation on this device, mostly the CPU.",
        "the model or a tensor was converted with .half() and run where half precision is for GPUs.",
        "use float32 or bfloat16 on the CPU, or torch.autocast, which leaves such operations in float32.",
    ),
    Message(
        r"mat1 and mat2 shapes cannot be multiplied \((?P<n>\d+)x(?P<got>\d+) and (?P<want>\d+)x(?P<out>\d+)\)"
        r"|size mismatch, m1: \[(?P<n2>\d+) x (?P<got2>\d+)\], m2: \[(?P<want2>\d+) x (?P<out2>\d+)\]",
        "A linear layer that expects another number of features",
        "the input has {got}{got2} features in its last dimension, the layer's weight takes {want}{want2}.",
        "in_features does not fit what comes before it: images of another size in front of a flatten, a missing or "
        "doubled flatten, a transposed input.",
        "set in_features={got}{got2}, or let LazyLinear or AdaptiveAvgPool2d settle it. print x.shape right before "
        "the line and follow it back to where it first differs from what you expect.",
    ),
    Message(
        r"Given groups=(?P<groups>\d+), weight of size (?P<weight>\[[\d, ]+\]), expected input\s?(?P<input>\[[\d, "
        r"]+\]) to have (?P<want>\d+) channels, but got (?P<got>\d+) channels",
        "A convolution that expects another number of channels",
        "the input {input} has {got} channels, the layer takes {want}.",
        "grey images for a network of colour images or the reverse, channels in the last place (NumPy and PIL have "
        "height, width, channels), a missing batch dimension, or layers that do not follow each other.",
        "x.permute(0, 3, 1, 2) for channels in the last place, x.unsqueeze(0) for a single image, "
        "in_channels={got}, or convert('RGB') where the images are read.",
    ),
    Message(
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) at non-singleton "
        r"dimension (?P<dim>\d+)",
        "Two shapes that do not go together",
        "an element-wise operation got {a} and {b} elements in dimension {dim}.",
        "shapes are aligned from the right: (n, c) with (n,) pairs c with n; or a residual path, a mask or a "
        "target has another length; or the last batch is smaller than a tensor of fixed size.",
        "print x.shape right before the line and follow it back to where it first differs from what you expect.",
    ),
    Message(
        r"Expected input batch_size \((?P<a>\d+)\) to match target batch_size \((?P<b>\d+)\)",
        "Outputs and targets of different number",
        "the output has {a} rows, the target {b}.",
        "a view or flatten moved the batch dimension, or sequences need (n * length, classes) with (n * length) "
        "targets.",
        "use flatten(1), which keeps the batch dimension. print x.shape right before the line and follow it back "
        "to where it first differs from what you expect.",
    ),
    Message(
        r"stack expects each tensor to be equal size, but got (?P<a>\[[\d, ]*\]) at entry 0 and (?P<b>\[[\d, ]*\]) "
        r"at entry (?P<n>\d+)",
        "Samples of different size in one batch",
        "entry 0 has shape {a}, entry {n} has {b}.",
        "the data set gives images or sequences of different sizes, which cannot be stacked into one batch.",
        "resize or crop in the transform, or pad in a collate_fn (torch.nn.utils.rnn.pad_sequence).",
    ),
    Message(
        r"Sizes of tensors must match except in dimension (?P<dim>\d+)\. (?:Expected size (?P<want>\d+) but got size "
        r"(?P<got>\d+) for tensor number (?P<n>\d+))?",
        "Tensors that cannot be joined",
        "torch.cat joins along dimension {dim}, and all other sizes must agree[[: tensor number {n} (from 0) has "
        "{got} where the first has {want}]].",
        "a skip connection of another resolution (an odd size halved and doubled again), another sequence length, or "
        "the wrong dim.",
        "print x.shape right before the line and follow it back to where it first differs from what you expect.",
    ),
    Message(
        "view size is not compatible with input tensor's size and stride",
        "A view of memory that is not in order",
        "view() was called on a tensor whose elements do not lie in memory in the order that the new shape needs.",
        "transpose, permute or a slice before it changed the order of the dimensions, not of the memory.",
        "use reshape(), which copies if it must. Think twice whether the dimensions are in the right order: reshape() "
        "after a wrong permute mixes samples in silence.",
    ),
    Message(
        r"shape '(?P<shape>\[[^\]]*\])' is invalid for input of size (?P<n>\d+)"
        r"|running_mean should contain (?P<c>\d+) elements not (?P<d>\d+)"
        r"|Given normalized_shape=(?P<e>\[[^\]]*\]), expected input",
        "A shape that does not fit",
        "two sizes do not go together[[: {n} elements do not make {shape}]][[: {c} channels came to a layer for "
        "{d}]][[: the layer is made for {e}]].",
        "a layer or a view is made for another size, or the batch size was written into a view (use -1, or x.size(0)).",
        "print x.shape right before the line and follow it back to where it first differs from what you expect.",
    ),
    Message(
        r"Expected more than 1 value per channel when training, got input size (?P<size>[^\n]*)",
        "Batch normalisation of a single value",
        "a BatchNorm layer in training mode got one value a channel: {size}.",
        "a batch of one sample, often the last of an epoch (1001 samples in batches of 100 leave 1), has no variance.",
        "drop_last=True in the loader (loader.drop_last=true), larger batches, GroupNorm or LayerNorm; for a trial "
        "with one sample model.eval().",
    ),
    Message(
        "all elements of (?:input|target) should be between 0 and 1",
        "A probability outside 0 and 1",
        "binary_cross_entropy got numbers that are no probabilities, NaN perhaps.",
        "the model's last layer has no sigmoid, targets are not 0 or 1, or the output is NaN.",
        "use binary_cross_entropy_with_logits on the raw output.",
    ),
)
