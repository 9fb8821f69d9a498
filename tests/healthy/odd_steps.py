"""Healthy programs with a step of the user's own: players, copies, surrogates. Touches nothing."""

import copy

import torch
from healthy.programs import (
    Program,
    adam,
    batches,
    draw,
    mlp,
    points,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = mlp(4, 32, 2)
        self.critic = mlp(2, 32, 1, function=lambda: nn.LeakyReLU(0.2))


def adversarial(seed):
    """Two players: neither loss has to fall."""

    def step(model, _, optimizer, batch):
        real = batch[0]
        fake = model.generator(torch.randn(len(real), 4))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        critic_loss = functional.binary_cross_entropy_with_logits(model.critic(real), ones)
        critic_loss = critic_loss + functional.binary_cross_entropy_with_logits(model.critic(fake.detach()), zeros)
        critics.zero_grad()
        critic_loss.backward()
        critics.step()
        loss = functional.binary_cross_entropy_with_logits(model.critic(fake), ones)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    model = Adversaries()
    generators = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critics = torch.optim.Adam(model.critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    made = draw(seed)
    data = TensorDataset(torch.randn(320, 2, generator=made) * 0.3 + torch.tensor([1.0, -1.0]))
    return Program(
        model=model, optimizer=generators, others=[critics], loader=batches(data), train_step=step, steps=150,
        flat="the losses of two players",
    )  # fmt: skip


def parts_with_optimizers(seed):
    """One loss, two optimizers, each with a part of the network."""

    def step(model, loss_fn, optimizer, batch):
        loss = loss_fn(model(batch[0]), batch[1])
        optimizer.zero_grad()
        other.zero_grad()
        loss.backward()
        optimizer.step()
        other.step()
        return loss

    model = mlp(8, 32, 4)
    other = torch.optim.SGD(model[0].parameters(), lr=0.1)
    return Program(
        model=model, loss_fn=nn.CrossEntropyLoss(), optimizer=adam(model[2]), others=[other],
        loader=batches(points(seed)), train_step=step,
    )  # fmt: skip


def own_accumulation(seed):
    """Steps every fourth batch; the gradients of the batches between add up, as they should."""
    count = 0

    def step(model, loss_fn, optimizer, batch):
        nonlocal count
        count += 1
        loss = loss_fn(model(batch[0]), batch[1]) / 4
        loss.backward()
        if count % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    model = mlp(8, 32, 4)
    return Program(
        model=model, loss_fn=nn.CrossEntropyLoss(), optimizer=adam(model, 1e-2), loader=batches(points(seed), 8),
        train_step=step, steps=200,
    )  # fmt: skip


def teacher_and_student(seed):
    teacher = mlp(8, 32, 4).requires_grad_(False)

    def step(model, _, optimizer, batch):
        target = teacher(batch[0]).mul(5).softmax(1)
        loss = functional.cross_entropy(model(batch[0]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    model = mlp(8, 32, 4)
    return Program(model=model, optimizer=adam(model), loader=batches(points(seed)), train_step=step)


def moving_target(seed):
    """Values that a slow copy of the network predicts, as in Q-learning: the target moves as the network learns."""
    inputs = points(seed).tensors[0]
    model = mlp(8, 32, 1)
    slow = copy.deepcopy(model).requires_grad_(False)

    def step(model, _, optimizer, batch):
        reward = batch[0][:, :1].tanh()
        with torch.no_grad():
            target = reward + 0.5 * slow(batch[0].roll(1, 0))
        loss = functional.smooth_l1_loss(model(batch[0]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(model.parameters(), slow.parameters(), strict=True):
                other.lerp_(own, 0.02)
        return loss

    return Program(model=model, optimizer=adam(model), loader=batches(TensorDataset(inputs)), train_step=step)


def policy_gradient(seed):
    """A bandit's expected reward by sampled choices: its loss has no meaning by itself."""

    def step(model, _, optimizer, batch):
        choice = torch.distributions.Categorical(logits=model(batch[0]))
        taken = choice.sample()
        reward = (taken == batch[1]).float()
        loss = -(choice.log_prob(taken) * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    model = mlp(8, 32, 4)
    return Program(
        model=model, optimizer=adam(model, 1e-2), loader=batches(points(seed), 32), train_step=step, steps=150,
        flat="a surrogate whose gradient alone has a meaning",
    )  # fmt: skip


KINDS = {
    builder.__name__: builder
    for builder in (
        adversarial,
        parts_with_optimizers,
        own_accumulation,
        teacher_and_student,
        moving_target,
        policy_gradient,
    )
}
