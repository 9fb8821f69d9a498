"""Every fault the project knows: what it is, how it is established, where it comes from, what to do. Data only.

`docs/faults.md` and ``mode=explain fault=ID`` are made from it, and each id that a finding can have is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CATALOGUE", "Fault"]


@dataclass(frozen=True)
class Fault:
    """One entry."""

    id: str
    title: str
    """What a student would say has happened."""
    established: str
    """What proves it."""
    causes: tuple[str, ...]
    """Likely ones, the likeliest first."""
    remedies: tuple[str, ...]
    """In the order to try them."""
    looks_like_it: str = ""
    """What resembles it and is healthy."""
    live: bool = True
    """Whether this version looks for it; the others come with a later one."""

    @property
    def group(self) -> str:
        """The part of the program it lies in: data, model, loss and so on."""
        return self.id.partition(".")[0]


_ENTRIES = (
    # --- data --------------------------------------------------------------------------------------------------------
    Fault(
        "data.nonfinite",
        "The inputs hold NaN or infinity",
        "the batch of a step that blew the fuse was bad on entry; the tracer walks back to it",
        ("missing values read as NaN", "log(0), or a division by a zero deviation, in the preprocessing"),
        ("fill or drop them (torch.nan_to_num hides them: look first)", "log1p(x), or (x - mean) / (std + 1e-6)"),
        "padding with infinities that a mask takes out again",
    ),
    Fault(
        "data.unnormalized",
        "Inputs or targets are far from the scale that weights are drawn for",
        "a short training on standardised inputs goes clearly better than on the raw ones",
        ("pixels of 0 to 255", "columns of very different units", "a transform forgotten in one split"),
        ("standardise with the training set's mean and deviation", "divide pixels by 255", "begin with BatchNorm"),
        "inputs that a first normalisation layer scales anyway, and counts that belong to a Poisson loss",
    ),
    Fault(
        "data.label_range",
        "Labels lie outside what the loss is defined for",
        "the smallest and largest label against the number of outputs and the loss",
        ("masks of 0 and 255 for a loss that wants 0 and 1", "classes counted from 1"),
        ("divide the mask by 255", "subtract 1", "ignore_index for labels that do not count"),
        "soft labels between 0 and 1, and -100 as ignore_index",
    ),
    Fault(
        "data.label_misaligned",
        "Labels belong to other samples",
        "a cheap probe learns the labels no better than permuted ones, or better when they are shifted",
        ("inputs and labels shuffled apart", "files sorted in two ways", "a join off by one row"),
        ("shuffle indices, not arrays", "look at twenty samples with their labels"),
        "a task with hardly any signal, which no order of labels mends",
    ),
    Fault(
        "data.label_noise",
        "Some labels are likely wrong",
        "asked for by preflight.label_noise: a cross-validated model gives the label hardly any probability",
        ("mistakes of those who labelled", "samples between two classes"),
        ("look at the samples that are listed, and correct or drop what is wrong",),
        "rare but right samples: it is an info, and a list to look at",
    ),
    Fault(
        "data.imbalance",
        "One class has hardly any samples",
        "the share of the rarest class, and the recall on it",
        ("the world is so", "a filter that dropped most of a class"),
        ("WeightedRandomSampler, or class weights in the loss", "judge by recall or F1, not by accuracy"),
        "rare labels of a multi-label task that are learnt all the same",
    ),
    Fault(
        "data.split_overlap",
        "The same samples are in training and in held-out data",
        "hashes of raw samples that occur in both, with the same label",
        ("split after augmentation or oversampling", "several pictures of one object", "random split of a time series"),
        ("split first, by object or by time", "drop what occurs twice"),
        "a few constant patches, which are equal by nature",
    ),
    Fault(
        "data.constant_input",
        "All samples are the same to the network",
        "no variation over samples in any input",
        ("a cast to integers that cuts 0 to 1 down to 0", "the same file read every time", "a mask that takes all out"),
        ("look at five samples as the network gets them", "convert with torchvision.transforms.v2.ToDtype(scale=True)"),
        "a single constant column among many",
    ),
    Fault(
        "data.worker_seed",
        "Workers of a DataLoader hand out the same random numbers",
        "augmented samples of two workers that are equal where they must differ",
        ("NumPy's or an own generator is copied into every worker by fork",),
        ("seed it in worker_init_fn from torch.initial_seed()", "draw from torch", "use this project's loaders"),
        "a data set that draws nothing",
    ),
    Fault(
        "data.not_shuffled",
        "Training batches come sorted by class",
        "classes within batches against what a random order gives",
        ("shuffle=False", "a sampler that keeps the order of files"),
        ("DataLoader(..., shuffle=True)",),
        "time series and curricula, whose order is meant",
    ),
    Fault(
        "data.mutated_inplace",
        "Reading a sample changes the data set",
        "the same index read twice gives two values, and the difference grows",
        ("sub_ or div_ on a view of the stored array", "ToTensor or from_numpy, which share memory"),
        ("work on a copy: array.copy(), tensor.clone()", "use operations without underscore"),
        "random augmentation, which varies but does not grow",
    ),
    Fault(
        "data.target_leak",
        "The input holds the answer",
        "one feature that alone predicts the label perfectly, or an output that depends on later inputs",
        ("a column made from the label", "no causal mask in a language model", "identifiers sorted by class"),
        ("leave the column out", "is_causal=True", "split by time"),
        "an easy task that many features solve together",
    ),
    Fault(
        "data.label_masked",
        "Labels that matter are left out of the loss",
        "the share of targets that ignore_index or a mask takes out",
        ("ignore_index equals a real class", "padding id 0 that is also a word"),
        ("give padding an id of its own", "check which labels the loss counts"),
        "padding and unlabelled pixels, which are meant to be left out",
    ),
    # --- model -------------------------------------------------------------------------------------------------------
    Fault(
        "model.unregistered_submodule",
        "Layers are invisible to model.parameters()",
        "a leaf of the graph that gets gradients and is no parameter of the model",
        ("layers in a plain list or dict", "a tensor in place of nn.Parameter"),
        ("nn.ModuleList, nn.ModuleDict", "nn.Parameter(tensor)", "register_buffer for what does not train"),
        "a teacher or a frozen table that is kept outside on purpose",
    ),
    Fault(
        "model.batch_mixing",
        "Samples of a batch influence each other in evaluation",
        "the output of one sample changes when the others are exchanged",
        ("view where permute or transpose was meant", "batch_first forgotten", "softmax over the batch dimension"),
        ("x.permute(...)", "batch_first=True", "softmax(dim=-1)"),
        "BatchNorm in training, and losses that contrast samples on purpose",
    ),
    Fault(
        "model.too_small",
        "The network cannot even fit its training data",
        "one batch cannot be learnt by heart at any learning rate, and gradients and wiring are in order",
        ("a layer of very few units", "strong regularisation"),
        ("widen the narrowest layer", "take dropout and weight decay out, to see"),
        "noise in the labels, which nobody can fit",
        live=False,
    ),
    Fault(
        "model.stuck_in_eval",
        "The network trains in eval mode",
        "modules in eval while gradients arrive and the optimizer steps, that were in training before",
        ("model.eval() in a validation that never switches back", "a pretrained model, which comes in eval"),
        ("model.train() after each validation", "call model.train() before training"),
        "frozen parts, and BatchNorm kept in eval from the very start on purpose",
    ),
    Fault(
        "model.eval_missing",
        "The network is evaluated in training mode",
        "forwards without gradients while Dropout or BatchNorm are in training mode",
        ("model.eval() forgotten",),
        ("model.eval(); with torch.no_grad(): ...; model.train()",),
        "Monte-Carlo dropout, and passes that renew BatchNorm's statistics",
    ),
    Fault(
        "model.non_deterministic_eval",
        "The same input gives two answers in evaluation",
        "two passes in eval mode differ, and the trace names the call that draws",
        ("F.dropout without training=self.training", "dropout_p in attention", "random sampling in forward"),
        ("nn.Dropout, or F.dropout(x, p, self.training)", "dropout_p=p if self.training else 0.0"),
        "variational and diffusion models that sample on purpose, Monte-Carlo dropout",
    ),
    Fault(
        "model.norm_stats",
        "A normalisation's statistics for evaluation are not those of the data",
        "each such module run alone: statistics that training never changes, or that settle away from the batch's",
        ("momentum=0 copied from a framework where it means the opposite", "statistics by hand that are not kept"),
        ("momentum=0.1", "keep what training divides by", "GroupNorm for small batches"),
        "a model that has just begun, and frozen normalisation with statistics of its own",
    ),
    # --- initial state -----------------------------------------------------------------------------------------------
    Fault(
        "init.dead",
        "Units are dead from the first step",
        "a rectifier's units that give zero for every sample from step 1 on",
        ("a bias far below zero", "weights of one sign", "inputs far from zero mean"),
        ("start biases at 0", "nn.init.kaiming_normal_", "standardise the inputs"),
        "zero-initialised residual branches, which wake up after a step",
    ),
    Fault(
        "init.zero_symmetric",
        "All units of a layer start equal and stay so",
        "rows of a weight that are equal, and get equal gradients",
        ("nn.init.constant_ or zeros_ on a whole weight",),
        ("draw weights at random; only biases may be constant",),
        "the last layer of a residual branch, or LoRA's second factor, at zero",
    ),
    Fault(
        "init.loss_off",
        "The first loss is far from what chance gives",
        "the first loss against a constant prediction, the class frequencies and permuted labels, under the same loss",
        ("an output layer drawn too wide", "a sum in place of a mean", "raw targets of a regression"),
        ("scale the last layer down", "reduction='mean'", "standardise the target"),
        "a pretrained network",
    ),
    Fault(
        "init.scale",
        "Activations start far too large or too small",
        "the spread of outputs from layer to layer at the first step",
        ("normal_(0, 1) whatever the number of inputs",),
        ("kaiming_normal_ for rectifiers, xavier_uniform_ for tanh", "normalisation layers"),
        "a factor of a few through the depth",
        live=False,
    ),
    # --- loss --------------------------------------------------------------------------------------------------------
    Fault(
        "loss.double_softmax",
        "Softmax or sigmoid is taken twice",
        "outputs that are probabilities, under a loss that applies softmax or sigmoid itself",
        ("nn.Softmax at the end of the network, and CrossEntropyLoss", "Sigmoid and BCEWithLogitsLoss"),
        ("leave the layer out: the loss wants raw scores", "NLLLoss with log_softmax, BCELoss with sigmoid"),
        "log_softmax in front of CrossEntropyLoss, which changes nothing",
    ),
    Fault(
        "loss.broadcast",
        "Output and target are stretched against each other",
        "an operation between output and target that is larger than both",
        ("outputs (N, 1) against targets (N,)",),
        ("output.squeeze(-1), or target.unsqueeze(-1)",),
        "one target for many predictions, stretched on purpose",
    ),
    Fault(
        "loss.wrong_sign",
        "Training makes the right answer less likely",
        "the loss of a fixed batch falls while its error grows",
        ("a minus forgotten in a hand-written likelihood", "a score that is to be maximised used as loss"),
        ("negate it",),
        "losses that are rightly negative: densities, Poisson likelihoods",
    ),
    Fault(
        "loss.log_of_zero",
        "A logarithm of zero",
        "the tracer finds log with 0 among its inputs as the first bad operation",
        ("log(softmax(x)) by hand", "probabilities that are exactly 0"),
        ("log_softmax, logsigmoid, xlogy", "x.clamp(min=1e-6).log()"),
        "infinities that a mask takes out before loss and gradient",
    ),
    Fault(
        "loss.reduction",
        "The loss is summed where a mean was meant",
        "the loss doubles with the batch",
        ("reduction='sum' with a rate chosen for a mean",),
        ("reduction='mean'", "divide by the number of samples"),
        "a sum over the features of each sample, with a mean over the batch",
    ),
    Fault(
        "loss.wrong_target_dtype",
        "A cast has destroyed the targets",
        "targets that have lost their fractions",
        ("a LongTensor for a regression",),
        ("keep floats for regression, torch.long for class indices",),
        "counts, which are whole by nature",
    ),
    Fault(
        "loss.input_domain",
        "A loss is fed what it is not defined for",
        "the range of outputs and targets against the loss's definition",
        ("kl_div without log", "BCELoss with scores outside 0 to 1", "NLLLoss with probabilities"),
        ("log_softmax in front of kl_div and NLLLoss", "BCEWithLogitsLoss"),
        "",
    ),
    # --- gradients ---------------------------------------------------------------------------------------------------
    Fault(
        "gradient.exploding",
        "Gradients grow beyond all measure",
        "two in three gradient norms a hundred times the run's own median, and a loss that does not come back",
        ("many layers, or time steps, without normalisation", "a rate that is too high", "clipping after the step"),
        ("clip_norm=auto, or the value that the finding names", "lower the learning rate", "normalise"),
        "single large gradients: healthy runs have some of thirty times the median",
    ),
    Fault(
        "gradient.vanishing",
        "The first layers get next to no gradient",
        "gradients of the first third of the layers ten thousand times smaller than those of the last, for long, while "
        "nothing is learnt",
        ("deep stacks of sigmoid or tanh", "weights drawn too small", "recurrence over many steps"),
        ("ReLU or GELU", "residual connections, normalisation", "LSTM or GRU in place of a plain RNN"),
        "converged networks, and zero-initialised branches",
    ),
    Fault(
        "gradient.missing",
        "A trainable part gets no gradient",
        "parameters without gradient in every step looked at, while others have some",
        ("detach, .data, .item(), numpy or no_grad on the way", "argmax or rounding", "a loss made anew from a number"),
        ("leave the graph whole", "a soft version of the choice (softmax, straight-through)"),
        "frozen layers, experts and embedding rows that this batch did not use",
    ),
    Fault(
        "gradient.incorrect",
        "A gradient is not the slope of its function",
        "directional derivatives in float64 against the gradients; hand-written functions one by one",
        ("a transposed matrix", "grad_output forgotten", "a term left out", "values changed through .data"),
        ("torch.autograd.gradcheck on the function", "let autograd derive it", "no in-place work on .data"),
        "kinks, stopped gradients, straight-through estimators and gradient reversal",
    ),
    Fault(
        "gradient.nonfinite",
        "The forward pass is finite, the backward pass is not",
        "the tracer finds an operation of the backward pass as the first bad one",
        ("sqrt or norm at 0", "0 * inf behind torch.where", "pow with a fractional exponent at 0"),
        ("sqrt(x + eps)", "make the input of the unused branch safe before torch.where"),
        "bad gradients that are thrown away",
    ),
    Fault(
        "gradient.accumulating",
        "Gradients are not cleared between optimizer steps",
        "a backward pass adds to the very gradient that an optimizer step has used",
        ("optimizer.zero_grad() forgotten, or once an epoch",),
        ("optimizer.zero_grad() once for each optimizer.step()",),
        "accumulation on purpose: several backward passes, one step, then zero_grad",
    ),
    Fault(
        "gradient.overclipped",
        "Clipping leaves next to nothing of each gradient",
        "nearly every step is scaled down a hundredfold, under an optimizer that feels the scale",
        ("a bound meant for another loss", "a loss summed over the batch"),
        ("the clip_norm that healthy norms suggest, or clip_norm=auto",),
        "Adam and its kin, which do not feel the scale",
    ),
    # --- activations -------------------------------------------------------------------------------------------------
    Fault(
        "activation.dead",
        "Units have died and cannot come back",
        "a rectifier's units that give exactly zero for all samples of several measured steps",
        ("a step that was too large", "a bias pushed far below zero"),
        ("a lower learning rate, or a warm-up", "LeakyReLU or GELU", "repair.dead_units=true"),
        "zeros among activations: 30 to 80 % are normal",
    ),
    Fault(
        "activation.saturated",
        "A sigmoid or tanh layer works on its flat ends",
        "most outputs of a hidden layer have a derivative below 1e-3, from the first step on",
        ("weights drawn too wide", "raw inputs"),
        ("xavier_uniform_", "standardise the inputs", "normalise in front"),
        "an output layer that has become sure",
    ),
    Fault(
        "activation.exploding",
        "Outputs grow from layer to layer",
        "the spread grows ten thousandfold through the depth at the first step, and harm follows",
        ("residual sums without normalisation", "weights drawn too wide"),
        ("normalisation", "the last layer of each branch at zero", "kaiming_normal_"),
        "a factor of ten or a hundred",
    ),
    Fault(
        "activation.collapsed",
        "A layer gives the same output whatever comes in",
        "one number throughout and no gradient for what feeds it; or all samples alike while the loss stands",
        ("softmax over a dimension of length 1", "all units dead", "a bottleneck that lost its information"),
        ("softmax over the right dimension", "look at the first layer with no spread"),
        "a network that begins at nothing and has not begun to learn",
    ),
    Fault(
        "forward.nonfinite",
        "An operation of the forward pass gives NaN or infinity",
        "the tracer finds the first operation with finite inputs and a bad output that reaches loss or gradient",
        ("a division by zero", "exp of a large number", "softmax over a row that is masked as a whole"),
        ("the finding's own advice: it knows the operation and its operands",),
        "-inf in an attention mask",
    ),
    # --- optimizer ---------------------------------------------------------------------------------------------------
    Fault(
        "optimizer.params_missing",
        "The optimizer does not hold the parameters that should train",
        "parameters with gradients that no optimizer holds, or an optimizer over tensors that the model does not use",
        ("built before a head was replaced, or a copy was made", "only a part was passed"),
        ("build the optimizer last, from model.parameters()",),
        "parts that are frozen on purpose (requires_grad=False says so)",
    ),
    Fault(
        "optimizer.lr_too_high",
        "Steps overshoot",
        "a step makes its own batch worse, and long after the loss is no better than at the start",
        ("a rate ten or a hundred times too high", "no warm-up for a Transformer", "a loss summed over the batch"),
        ("a tenth of the rate", "a warm-up", "clip_norm"),
        "a few wild first steps that the run recovers from",
    ),
    Fault(
        "optimizer.lr_too_low",
        "Steps change next to nothing",
        "updates below 2e-5 of the weights, and batches that their own step does not help",
        ("a rate of another optimizer", "a schedule that has ended", "a typing slip in the exponent"),
        ("tenfold, and again, until updates are about 1e-3 of the weights",),
        "the end of a cosine, and a warm-up's first steps",
    ),
    Fault(
        "optimizer.scheduler_misuse",
        "The schedule does not do what it says",
        "a scheduler over another optimizer, a rate of nothing long before the end, or stepped in the wrong unit",
        ("an epoch's scheduler stepped at each batch", "a factor of 0", "built for an earlier optimizer"),
        ("scheduler_interval=step or epoch as it is meant", "look at the rate's curve"),
        "warm restarts and one-cycle schedules that end at nearly nothing",
    ),
    Fault(
        "optimizer.step_missing",
        "No optimizer ever steps",
        "gradients arrive, no optimizer has moved, and no weight has changed",
        ("a condition around step() that is never true", "the call forgotten"),
        ("(index + 1) % n == 0 for accumulation",),
        "accumulation over many batches, and a loss scale that is settling",
    ),
    Fault(
        "optimizer.weight_decay",
        "Weight decay eats the weights",
        "the norm of all weights falls below a tenth while nothing is learnt",
        ("a decay of 1 where 1e-4 was meant", "decay added to the loss as well"),
        ("1e-4 to 1e-2, at most 0.1 with AdamW", "none on norms and biases"),
        "weights that shrink a little while the loss falls",
    ),
    # --- training ----------------------------------------------------------------------------------------------------
    Fault(
        "training.not_decreasing",
        "The loss stays where it began",
        "no falling trend, and steps that do no good to their own batch; without that proof an info",
        ("a learning rate far too low or too high", "labels that do not belong to the inputs", "a cut graph"),
        ("overfit one batch", "look at the other findings: this is a symptom"),
        "a network that starts at its floor, noise in place of labels",
    ),
    Fault(
        "training.oscillating",
        "The loss swings and gets nowhere",
        "losses up and down in turn that no longer fall, and steps that throw up their own batch's loss",
        ("a learning rate that is too high", "tiny batches", "gradients that add up"),
        ("lower the rate", "larger batches"),
        "the noise of small batches, two batches in turn, opposed networks",
    ),
    Fault(
        "training.diverging",
        "The loss leaves its own past and does not come back",
        "spikes by median and MAD that persist, no lower than where training began",
        ("a rate that rose", "an instability late in training"),
        ("a lower rate, clipping", "guard.nonfinite=rollback", "go back to a checkpoint"),
        "single spikes, warm restarts, losses that are added in",
    ),
    Fault(
        "training.overfitting",
        "The network learns its training samples by heart",
        "the validation loss far above its best for half of all evaluations, while the training loss has halved",
        ("too few samples for the network", "noisy labels"),
        ("early_stopping.patience, the best checkpoint", "augmentation, weight decay, dropout", "a smaller network"),
        "a gap between the curves, which every network has",
    ),
    Fault(
        "training.plateau",
        "The loss has stopped far above its floor",
        "no fall for half of the run, far above nothing; an info, as it may be the floor",
        ("a network that is too small", "a rate that fell too early"),
        ("a wider network", "another schedule"),
        "convergence, noise in the labels",
    ),
    Fault(
        "memory.graph_retained",
        "Graphs of past steps are never freed",
        "the number of living graphs grows with the steps",
        ("losses added up or kept as tensors", "evaluation with gradients"),
        ("loss.item() or loss.detach()", "torch.no_grad() in evaluation"),
        "one loss that is still alive",
    ),
    Fault(
        "precision.overflow",
        "Half precision cannot hold the values",
        "an operation in float16 that overflows where float32 would not, or a loss scale that falls to its floor",
        ("sums of squares in float16", "gradients that are truly too large"),
        ("precision=bf16", "compute sums and norms in float32"),
        "a loss scale's search in the first steps",
    ),
    Fault(
        "precision.underflow",
        "Half precision swallows the updates",
        "weights in half precision that do not change although the optimizer steps",
        ("bfloat16 weights with a small rate", "an eps that is zero in float16"),
        ("float32 weights with autocast", "eps=1e-4 for Adam in float16"),
        "some small weights that stand still for a step",
    ),
)  # fmt: skip

CATALOGUE: dict[str, Fault] = {entry.id: entry for entry in _ENTRIES}
"""All entries by id, in reading order."""
