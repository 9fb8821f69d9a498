"""Faults of a training program on two architectures, each with a mended twin, and what is legal but looks alike."""

import copy
import itertools
import json

import pytest
import torch
from programs import SmallCNN, blobs, fingerprint, loader_of, mlp, pictures
from torch import nn

from safe_trainer.diagnosis.program import rules
from safe_trainer.utils.program_facts import ProgramFacts


def networks():
    """Name, model and batches: a perceptron on points, a convolutional net on pictures."""
    return {"mlp": (mlp, blobs(16 * 8)), "cnn": (SmallCNN, pictures(16 * 8))}


def both(function):
    return pytest.mark.parametrize("name", ["mlp", "cnn"])(function)


class Program:
    """A small training program whose step can be broken."""

    def __init__(self, name, optimizer=torch.optim.SGD, **options):
        torch.manual_seed(0)
        make, data = networks()[name]
        self.model, self.data = make(), data
        self.batches = list(loader_of(data, seed=0))
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.05, **options})
        self.loss_fn = nn.CrossEntropyLoss()

    def loss(self, batch):
        return self.loss_fn(self.model(batch[0]), batch[1])

    def step(self, number, batch):
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def findings(self, steps=32, optimizers=None, schedulers=(), after=None, plan=None, step=None):
        facts = ProgramFacts(self.model, optimizers or [self.optimizer], schedulers)
        batches = itertools.islice(itertools.cycle(self.batches), steps)
        with facts:
            for number, batch in enumerate(batches, 1):
                with facts.looking(number):
                    (step or self.step)(number, batch)
                if after is not None:
                    after(number, facts)
        self.record = facts.record
        found = rules(facts.record, **(plan or {}))
        again = rules(type(facts.record).from_state(json.loads(json.dumps(facts.record.state_dict()))), **(plan or {}))
        assert found == again, "a record that was written and read says the same"
        assert not any(module._forward_hooks for module in self.model.modules())
        assert not any(parameter._backward_hooks for parameter in self.model.parameters())
        return found


def told(findings):
    return [(finding.fault, str(finding.severity)) for finding in findings if finding.is_alarm]


@both
def test_a_plain_loop_is_silent(name):
    assert Program(name).findings(steps=120) == []


# --- gradients that are never cleared --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_never_cleared(name, set_to_none):
    program = Program(name, lr=0.001)

    def forgets(number, batch):
        program.loss(batch).backward()
        program.optimizer.step()

    def remembers(number, batch):  # forward, zero_grad, backward, step: gradients are set when the forward runs
        loss = program.loss(batch)
        program.optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
        program.optimizer.step()

    assert told(program.findings(step=forgets)) == [("gradient.accumulating", "error")]
    assert told(program.findings(step=remembers)) == []


@both
def test_gradients_cleared_once_an_epoch(name):
    program = Program(name, lr=0.001, momentum=0.9)

    def step(number, batch):
        if number % 16 == 1:
            program.optimizer.zero_grad()
        program.loss(batch).backward()
        nn.utils.clip_grad_norm_(program.model.parameters(), 100.0)
        program.optimizer.step()

    (finding,) = program.findings(step=step)
    assert (finding.fault, finding.step) == ("gradient.accumulating", 3)


@both
@pytest.mark.parametrize("group", [2, 7, 64])
def test_accumulation_is_legal(name, group):
    program = Program(name)

    def step(number, batch):
        (program.loss(batch) / group).backward()
        if number % group == 0:
            program.optimizer.step()
            program.optimizer.zero_grad()

    assert program.findings(step=step, steps=140) == []


def test_alternating_optimizers_are_legal():
    """A discriminator's used gradients are added to by the generator's loss, and cleared before they are used again."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(4, 8), "critic": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))})
    first = torch.optim.Adam(model["generator"].parameters(), lr=1e-3)
    second = torch.optim.Adam(model["critic"].parameters(), lr=1e-3)
    program = Program("mlp")
    program.model = model

    def step(number, batch):
        second.zero_grad()
        fake = model["generator"](torch.randn(16, 4))
        model["critic"](batch[0]).mean().backward()
        (-model["critic"](fake.detach()).mean()).backward()
        second.step()
        if number % 3 == 0:
            first.zero_grad()
            model["critic"](fake).mean().backward()
            first.step()

    assert program.findings(step=step, steps=120, optimizers=[first, second]) == []


def test_closures_are_legal_and_are_looked_into():
    program = Program("mlp", optimizer=torch.optim.LBFGS, lr=0.1, max_iter=3)

    def step(number, batch, clears=True):
        def closure():
            if clears:
                program.optimizer.zero_grad()
            loss = program.loss(batch)
            loss.backward()
            return loss

        program.optimizer.step(closure)

    assert program.findings(step=step) == []
    broken = told(program.findings(step=lambda number, batch: step(number, batch, clears=False)))
    assert ("gradient.accumulating", "error") in broken


def test_a_gradient_kept_on_purpose_as_momentum_is_legal():
    program = Program("mlp", lr=0.01)

    def step(number, batch):
        program.loss(batch).backward()
        program.optimizer.step()
        for parameter in program.model.parameters():
            parameter.grad *= 0.5

    assert told(program.findings(step=step)) == []


# --- steps that are missing ------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("clears", [True, False])
def test_an_optimizer_that_never_steps(name, clears):
    program = Program(name)

    def step(number, batch):
        if clears:
            program.optimizer.zero_grad()
        program.loss(batch).backward()

    steps = 40 if clears else 270
    assert told(program.findings(step=step, steps=steps)) == [("optimizer.step_missing", "error")]
    assert told(program.findings(step=step, steps=20)) == []
    assert told(program.findings(step=step, steps=20, plan={"finished": True})) == []  # perhaps an open group
    assert told(program.findings(step=step, steps=40, plan={"finished": True})) == [("optimizer.step_missing", "error")]


def test_steps_made_by_hand_are_legal():
    program = Program("mlp")

    def step(number, batch):
        program.model.zero_grad()
        program.loss(batch).backward()
        with torch.no_grad():
            for parameter in program.model.parameters():
                parameter -= 0.01 * parameter.grad

    assert told(program.findings(step=step, steps=120)) == []


@both
def test_an_optimizer_that_stops_stepping(name):
    program = Program(name)

    def step(number, batch):
        program.optimizer.zero_grad()
        program.loss(batch).backward()
        if number < 20:
            program.optimizer.step()

    assert told(program.findings(step=step, steps=302)) == [("optimizer.step_missing", "warning")]


@both
def test_steps_without_any_gradient(name):
    program = Program(name)

    def rewrapped(number, batch):
        program.optimizer.zero_grad()
        loss = torch.tensor(program.loss(batch).item(), requires_grad=True)
        loss.backward()
        program.optimizer.step()

    def cleared_too_late(number, batch):
        program.loss(batch).backward()
        program.optimizer.zero_grad()
        program.optimizer.step()

    for step in (rewrapped, cleared_too_late):
        program.optimizer.zero_grad()
        assert told(program.findings(step=step)) == [("gradient.missing", "error")]


def test_a_scaler_that_skips_its_first_steps_is_legal():
    program = Program("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(number, batch):
        program.optimizer.zero_grad()
        loss = program.loss(batch) * (float("inf") if number < 6 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(program.optimizer)
        nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
        scaler.step(program.optimizer)
        scaler.update()

    assert program.findings(step=step, steps=120) == []
    (late,) = [look for look in program.record.looks if look.step == 100]
    assert late.norm_arrived < 50, "the scaler's factor is not taken for a gradient"


# --- who is in the optimizer -----------------------------------------------------------------------------------------


@both
def test_an_optimizer_of_a_copy(name):
    program = Program(name)
    program.optimizer = torch.optim.Adam(copy.deepcopy(program.model).parameters())
    (finding,) = program.findings(steps=4)
    assert (finding.fault, finding.severity, finding.step) == ("optimizer.params_missing", "error", 2)
    program.optimizer = torch.optim.Adam(program.model.parameters())
    assert program.findings() == []


def test_a_head_that_was_replaced_after_the_optimizer_was_built():
    program = Program("cnn")
    program.model.head = nn.Linear(4 * 64, 3)
    (finding,) = program.findings()
    assert (finding.fault, finding.where, finding.severity) == ("optimizer.params_missing", "head", "warning")
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.01)
    assert program.findings() == []


def test_a_part_in_no_optimizer():
    program = Program("mlp")
    program.optimizer = torch.optim.SGD(list(program.model.parameters())[:4], lr=0.01)
    assert [(f.fault, f.where) for f in program.findings()] == [("optimizer.params_missing", "4")]
    program.model[4].requires_grad_(False)
    assert program.findings() == []


def test_a_part_that_an_optimizer_moves_that_was_not_shown_is_legal():
    program = Program("mlp")
    hidden = torch.optim.SGD(program.model[4].parameters(), lr=0.01)
    program.optimizer = torch.optim.SGD(list(program.model.parameters())[:4], lr=0.01)

    def step(number, batch):
        hidden.zero_grad()
        program.step(number, batch)
        hidden.step()

    assert program.findings(step=step) == []


class Blind(nn.Module):
    """A backbone that is called without gradients."""

    def __init__(self, name, blind=True):
        super().__init__()
        parts = list((mlp() if name == "mlp" else SmallCNN()).children())
        self.backbone, self.head, self.blind = nn.Sequential(*parts[:-1]), parts[-1], blind

    def forward(self, inputs):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.blind):
            features = self.backbone(inputs)
        return self.head(features)


@both
def test_a_part_that_runs_without_gradients(name):
    program = Program(name)
    for blind, frozen in ((True, False), (True, True), (False, False)):
        torch.manual_seed(0)
        program.model = Blind(name, blind)
        program.model.backbone.requires_grad_(not frozen)
        program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.01)
        expected = [("gradient.missing", "backbone")] if blind and not frozen else []
        assert [(f.fault, f.where.split(".")[0]) for f in program.findings()] == expected


class Experts(nn.Module):
    """One of two experts a step, a pooler that nobody uses, a tied weight and a branch that begins at zero."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.pooler, self.tied = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)
        self.experts[0].weight = self.tied.weight
        nn.init.zeros_(self.up.weight)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        hidden = self.tied(self.experts[self.calls % 2](inputs)) + self.up(self.down(inputs))
        self.pooler(hidden)
        return self.head(hidden)


def test_parts_without_a_gradient_now_and_then_are_legal():
    program = Program("mlp")
    program.model = Experts()
    program.optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-3)
    assert program.findings(steps=120) == []


# --- modes -----------------------------------------------------------------------------------------------------------


def validation(program, mode="as it is"):
    def validate():
        if mode != "as it is":
            program.model.eval()
        with torch.no_grad():
            total = sum(float(program.loss(batch)) for batch in program.batches[:3])
        if mode == "and back":
            program.model.train()
        return total

    return validate


@both
@pytest.mark.parametrize("declared", [True, False])
def test_an_evaluation_in_training_mode(name, declared):
    program = Program(name)

    def after(validate, number, facts):
        if number % 8 == 0:
            if declared:
                with facts.evaluating():
                    validate()
            else:
                validate()

    broken, mended = validation(program), validation(program, "and back")
    (finding,) = program.findings(after=lambda *given: after(broken, *given))
    assert (finding.fault, finding.where) == ("model.eval_missing", "validate")
    assert finding.severity == ("error" if declared else "warning")
    assert program.findings(after=lambda *given: after(mended, *given)) == []


@both
def test_an_evaluation_in_training_mode_within_the_step(name):
    program = Program(name)
    validate = validation(program)

    def step(number, batch):
        program.step(number, batch)
        if number % 5 == 0:
            validate()

    assert [(f.fault, f.where) for f in program.findings(step=step)] == [("model.eval_missing", "validate")]


def test_layers_to_which_the_mode_does_not_matter_are_legal():
    program = Program("mlp")
    program.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.LayerNorm(8), nn.Linear(8, 3))
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.01)
    validate = validation(program)
    assert program.findings(after=lambda number, facts: validate()) == []


def test_a_teacher_monte_carlo_dropout_and_the_training_accuracy_are_legal():
    program = Program("mlp")

    def step(number, batch):
        with torch.no_grad():
            before = program.model(batch[0])  # a target to learn from
        program.optimizer.zero_grad()
        (program.loss(batch) + (program.model(batch[0]) - before).square().mean()).backward()
        program.optimizer.step()
        with torch.no_grad():
            program.model(batch[0])  # the accuracy on the batch that was trained on

    def samples(number, facts):
        if number % 8 == 0:
            with torch.no_grad():
                for batch in program.batches[:2]:
                    for _ in range(3):
                        program.model(batch[0])

    assert program.findings(step=step, after=samples) == []


def test_a_generators_samples_now_and_then_are_legal():
    program, noise = Program("mlp"), torch.randn(4, 8)

    def samples(number, facts):
        if number % 4 == 0:
            with torch.no_grad():
                program.model(noise)

    assert program.findings(after=samples, steps=60) == []


def test_measuring_batchnorm_anew_is_legal():
    program = Program("cnn")

    def after(number, facts):
        if number % 8 == 0:
            with facts.evaluating(), torch.no_grad():
                for batch in program.batches:
                    program.model(batch[0])
                program.model.eval()
                program.loss(batch)
                program.model.train()

    assert program.findings(after=after) == []


@both
def test_a_model_left_in_eval(name):
    program = Program(name)

    def step(validate, number, batch):
        program.step(number, batch)
        if number % 8 == 1:
            validate()

    broken, mended = validation(program, "and not back"), validation(program, "and back")
    (finding,) = program.findings(step=lambda *given: step(broken, *given))
    assert (finding.fault, finding.severity, finding.where) == ("model.stuck_in_eval", "error", None)
    program.model.train()
    assert program.findings(step=lambda *given: step(mended, *given)) == []


def test_a_part_left_in_eval():
    program = Program("cnn")

    def step(number, batch):
        program.step(number, batch)
        program.model.features.eval()

    (finding,) = program.findings(step=step)
    assert (finding.fault, finding.severity, finding.where) == ("model.stuck_in_eval", "warning", "features")
    program.model.train().features.requires_grad_(False)
    assert program.findings(step=step) == []


def test_norms_frozen_later_and_an_attack_in_eval_are_legal():
    program = Program("cnn")

    def freezes(number, batch):
        if number > 5:
            program.model.features[1].eval()
        program.step(number, batch)

    def attacks(number, batch):
        program.model.eval()
        inputs = batch[0].clone().requires_grad_()
        program.loss((inputs, batch[1])).backward()
        program.model.train()
        program.step(number, (inputs.detach() + 0.01 * inputs.grad.sign(), batch[1]))

    assert program.findings(step=freezes) == []
    program.model.train()
    assert program.findings(step=attacks) == []


def test_a_model_in_eval_from_the_start_is_worth_a_word():
    program = Program("cnn")
    program.model.eval()
    (finding,) = program.findings()
    assert (finding.fault, finding.severity) == ("model.stuck_in_eval", "info")


# --- graphs ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("how", ["sum", "list", "evaluation", "evaluation outside"])
def test_graphs_that_pile_up(name, how):
    program = Program(name)
    for detach in (False, True):
        kept = []

        def keep(batch, kept=kept, detach=detach):
            loss = program.loss(batch)
            loss = loss.detach() if detach else loss
            kept[:] = [sum(kept) + loss] if how == "sum" else [*kept, loss]

        def step(number, batch, kept=kept, keep=keep, detach=detach):
            program.optimizer.zero_grad()
            loss = program.loss(batch)
            loss.backward()
            program.optimizer.step()
            if how in ("sum", "list"):
                loss = loss.detach() if detach else loss
                kept[:] = [sum(kept) + loss] if how == "sum" else [*kept, loss]
            elif how == "evaluation":
                program.model.eval()
                keep(batch)
                program.model.train()

        def after(number, facts, keep=keep):
            if how == "evaluation outside":
                program.model.eval()
                keep(program.batches[0])
                program.model.train()

        expected = [] if detach else [("memory.graph_retained", "warning")]
        assert told(program.findings(step=step, after=after)) == expected


def test_one_loss_or_the_last_few_kept_with_their_graph_are_legal():
    program = Program("mlp")
    best, latest = [], []

    def step(number, batch):
        program.optimizer.zero_grad()
        loss = program.loss(batch)
        loss.backward()
        program.optimizer.step()
        best[:] = [min([*best, loss], key=lambda kept: kept.item())]
        latest[:] = [*latest, loss][-8:]

    assert program.findings(step=step, steps=120) == []


def test_one_backward_for_many_forwards_is_legal():
    program = Program("mlp")
    losses = []

    def step(number, batch):
        losses.append(program.loss(batch))
        if number % 40 == 0:
            program.optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            program.optimizer.step()
            losses.clear()

    assert program.findings(step=step, steps=120) == []


# --- schedules -------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "step": lambda o, epochs, unit: torch.optim.lr_scheduler.StepLR(o, 2 * unit, 0.1),
    "milestones": lambda o, epochs, unit: torch.optim.lr_scheduler.MultiStepLR(o, [2 * unit, 6 * unit], 0.1),
    "exponential": lambda o, epochs, unit: torch.optim.lr_scheduler.ExponentialLR(o, 0.8 ** (1 / unit)),
    "cosine": lambda o, epochs, unit: torch.optim.lr_scheduler.CosineAnnealingLR(o, (3 if unit == 1 else 20) * unit),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_epochs_stepped_each_batch(kind):
    for unit in (1, 8):
        program = Program("mlp", lr=0.05)
        scheduler = SCHEDULES[kind](program.optimizer, 20, unit)
        findings = program.findings(
            steps=160, schedulers=[scheduler], after=lambda *_, s=scheduler: s.step(),
            plan={"planned_steps": 160, "epoch_length": 8},
        )  # fmt: skip
        assert told(findings) == ([("optimizer.scheduler_misuse", "warning")] if unit == 1 else [])


@both
def test_a_factor_of_zero_and_a_rate_that_ends_at_zero(name):
    for kind, expected in (("step", [("optimizer.scheduler_misuse", "warning")]), ("linear", []), ("warm-up", [])):
        program = Program(name)
        scheduler = {
            "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 60, 0.0),
            "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 160),
            "warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 20)),
        }[kind](program.optimizer)
        plan = {"planned_steps": 160, "epoch_length": 8}
        found = program.findings(steps=160, schedulers=[scheduler], after=lambda *_, s=scheduler: s.step(), plan=plan)
        assert told(found) == expected


def test_one_cycle_stepped_once_an_epoch():
    for each in (1, 8):
        program = Program("mlp")
        scheduler = torch.optim.lr_scheduler.OneCycleLR(program.optimizer, 0.1, total_steps=160 + 1)
        found = program.findings(
            steps=160, schedulers=[scheduler],
            after=lambda number, _, s=scheduler, n=each: s.step() if number % n == 0 else None,
            plan={"planned_steps": 160, "epoch_length": 8},
        )  # fmt: skip
        assert told(found) == ([("optimizer.scheduler_misuse", "warning")] if each == 8 else [])


def test_a_scheduler_of_another_optimizer():
    program = Program("mlp")
    scheduler = torch.optim.lr_scheduler.StepLR(program.optimizer, 10)
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.05)
    assert told(program.findings(schedulers=[scheduler])) == [("optimizer.scheduler_misuse", "error")]


# --- clipping and precision ------------------------------------------------------------------------------------------


def clipping(program, limit, late=False):
    def step(number, batch):
        program.optimizer.zero_grad()
        program.loss(batch).backward()
        if late:
            program.optimizer.step()
        nn.utils.clip_grad_norm_(program.model.parameters(), limit)
        if not late:
            program.optimizer.step()

    return step


@both
def test_clipping_to_almost_nothing(name):
    program = Program(name, momentum=0.9)
    assert told(program.findings(step=clipping(program, 1e-5))) == [("gradient.overclipped", "warning")]
    assert told(program.findings(step=clipping(program, 0.1))) == []
    program.optimizer = torch.optim.Adam(program.model.parameters(), lr=1e-3)  # does not mind the scale
    assert told(program.findings(step=clipping(program, 1e-5))) == []


def test_gradients_divided_by_a_number_of_samples_are_legal():
    program = Program("mlp")

    def step(number, batch):
        program.optimizer.zero_grad()
        (program.loss(batch) * (tokens := 1000 + 100 * number)).backward()
        for parameter in program.model.parameters():
            parameter.grad /= tokens
        program.optimizer.step()

    assert told(program.findings(step=step)) == []


@both
def test_clipping_behind_the_step(name):
    program = Program(name, lr=0.001)
    assert told(program.findings(step=clipping(program, 0.01, late=True))) == [("gradient.exploding", "warning")]
    assert told(program.findings(step=clipping(program, float("inf"), late=True))) == []


@both
def test_half_precision_swallows_updates(name):
    for dtype, rate in ((torch.bfloat16, 1e-4), (torch.bfloat16, 3e-2), (torch.float32, 1e-4)):
        program = Program(name)
        program.model = program.model.to(dtype)
        program.optimizer = torch.optim.Adam(program.model.parameters(), lr=rate)
        program.batches = [(inputs.to(dtype), targets) for inputs, targets in program.batches]
        expected = [("precision.underflow", "warning")] if rate == 1e-4 and dtype is torch.bfloat16 else []
        assert told(program.findings(steps=120)) == expected


def test_an_eps_that_is_zero_in_float16():
    for eps, expected in ((1e-8, [("precision.underflow", "error")]), (1e-4, [])):
        program = Program("mlp")
        program.model = nn.Sequential(nn.Linear(8, 3)).half()
        program.batches = [(inputs.half(), targets) for inputs, targets in program.batches]
        program.optimizer = torch.optim.Adam(program.model.parameters(), lr=1e-3, eps=eps)
        assert told(program.findings(steps=1)) == expected


# --- what the facts promise ------------------------------------------------------------------------------------------


@both
def test_looking_changes_no_bit(name):
    outcomes = []
    for every in (0, 3):
        program = Program(name, momentum=0.9)
        facts = ProgramFacts(program.model, [program.optimizer], every=every)
        with facts:
            for number, batch in enumerate(program.batches, 1):
                with facts.looking(number):
                    program.step(number, batch)
        outcomes.append([*fingerprint(program.model, program.optimizer), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True) if isinstance(a, torch.Tensor))


def test_a_resumed_run_comes_to_the_same_findings():
    whole, first, second = (Program("mlp", lr=0.001) for _ in range(3))

    def forgets(program):
        def step(number, batch):
            program.loss(batch).backward()
            program.optimizer.step()

        return step

    expected = whole.findings(step=forgets(whole), steps=31)
    facts = ProgramFacts(first.model, [first.optimizer])
    batches = list(itertools.islice(itertools.cycle(first.batches), 31))
    with facts:
        for number, batch in enumerate(batches[:15], 1):
            with facts.looking(number):
                forgets(first)(number, batch)
    state = facts.state_dict()
    second.model.load_state_dict(first.model.state_dict())
    resumed = ProgramFacts(second.model, [second.optimizer])
    resumed.load_state_dict(copy.deepcopy(state))
    with resumed:
        for number, batch in enumerate(batches[15:], 16):
            with resumed.looking(number):
                forgets(second)(number, batch)
    assert told(rules(resumed.record)) == told(expected) != []
    assert resumed.record.optimizers[0].steps == 31


def test_hooks_go_when_the_step_raises():
    program = Program("cnn")
    facts = ProgramFacts(program.model, [program.optimizer])

    def run():
        with facts, facts.looking(1):
            program.loss(program.batches[0]).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert not any(module._forward_hooks for module in program.model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in program.model.parameters())
    assert not program.optimizer._optimizer_step_pre_hooks
    assert facts.record.looks == []


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="every must be 0"):
        ProgramFacts(nn.Linear(2, 2), [], every=-1)
