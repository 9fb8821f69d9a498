"""Synthetic loss curves of healthy runs, by kind: all that other tools are known to cry wolf at. NumPy only."""

import numpy as np


def noise(rng, steps, sigma=0.2, memory=0.0):
    """Multiplicative noise; with `memory`, each step resembles the one before."""
    steady = np.sqrt(1 - memory**2)
    logs, value = np.empty(steps), 0.0
    for step in range(steps):
        value = memory * value + steady * rng.normal()
        logs[step] = value
    return np.exp(sigma * logs)


def decay(steps, start, floor, pace):
    return floor + (start - floor) * np.exp(-np.arange(steps) / pace)


def falling(rng, steps):
    return decay(steps, 2.3, rng.uniform(0.05, 1), rng.uniform(10, steps)) * noise(rng, steps, rng.uniform(0.02, 0.6))


def autocorrelated(rng, steps):
    return decay(steps, 2.3, 0.3, 50) * noise(rng, steps, 0.5, 0.9)


def batch_of_one(rng, steps):
    """Mostly near nothing, now and then several units."""
    wrong = rng.random(steps) < 0.1 + 0.6 * np.exp(-np.arange(steps) / 40)
    return np.where(wrong, rng.gamma(2.0, 1.5, steps), rng.exponential(0.05, steps) ** 2)


def heavy_tailed(rng, steps):
    return decay(steps, 5, 1, 60) * (1 + rng.pareto(1.5, steps))


def lognormal_two(rng, steps):
    return decay(steps, 3, 0.5, 60) * noise(rng, steps, 2.0)


def converged(rng, steps):
    """Falls to 1e-9 of its start and flickers there by orders of magnitude."""
    return 2.3 * np.exp(-np.minimum(np.arange(steps) / 8, 20)) * noise(rng, steps, 2.0, 0.8)


def exact_zero(rng, steps):
    return np.maximum(decay(steps, 1, -0.5, 30) + rng.normal(0, 0.02, steps), 0)


def poisson(rng, steps):
    return decay(steps, -200, -236, 40) + rng.normal(0, rng.uniform(1, 8), steps)


def flow(rng, steps):
    """Crosses zero."""
    return decay(steps, 4, -3, 80) + rng.normal(0, rng.uniform(0.05, 1), steps)


def heavy_negative(rng, steps):
    return decay(steps, 0, -50, 60) + rng.standard_t(2, steps)


def warm_restarts(rng, steps):
    place = np.arange(steps) % (steps // 3)
    return (decay(steps, 2.3, 0.1, 60) + 1.2 * np.exp(-place / 15) * (np.arange(steps) > 50)) * noise(rng, steps)


def curriculum(rng, steps):
    """Each stage begins at up to ten times what the run began with, and is learned."""
    place, stage = np.arange(steps) % (steps // 4), np.arange(steps) // (steps // 4)
    return rng.uniform(1, 10) ** (stage / 3) * (0.1 + 2 * np.exp(-place / rng.uniform(10, 60))) * noise(rng, steps)


def sorted_classes(rng, steps):
    place = np.arange(steps) % 25
    return (0.1 + 8 * np.exp(-place / 4)) * noise(rng, steps, 0.4)


def generator_of_a_gan(rng, steps):
    return (0.7 + rng.uniform(1, 6) * (1 - np.exp(-np.arange(steps) / (steps / 4)))) * noise(rng, steps, 0.3, 0.9)


def discriminator_of_a_gan(rng, steps):
    """Wins at first, then meets its match: back to where it began."""
    half = steps // 2
    won = decay(half, 1.39, 0.1, 30)
    return np.concatenate([won, 1.38 - 1.25 * np.exp(-np.arange(steps - half) / 60)]) * noise(rng, steps, 0.2, 0.5)


def alternating_batches(rng, steps):
    return np.where(np.arange(steps) % 2, 0.1, 5.0) * noise(rng, steps)


def fading_term(rng, steps):
    """A divergence term comes in, as in a VAE."""
    ramp = np.minimum(np.arange(steps) / (steps / 2), 1)
    return (decay(steps, 70, 10, 30) + ramp * 60) * noise(rng, steps, 0.05)


def rising_weight(rng, steps):
    """The whole loss is multiplied by a weight that grows from nothing."""
    return np.minimum((np.arange(steps) + 1) / (steps / 2), 1) * 2 * noise(rng, steps, 0.1)


def values_of_an_agent(rng, steps):
    """A temporal-difference loss grows with the returns."""
    return (0.5 + 40 / (1 + np.exp(-(np.arange(steps) - steps / 2) / (steps / 10)))) * noise(rng, steps, 0.8)


def slingshot(rng, steps):
    """Adam's late instabilities: bursts of dozens of steps, each gone by itself."""
    place = (np.arange(steps) + 60) % 100
    burst = np.where(np.arange(steps) > 60, 3 * np.exp(-place / 8), 0)
    return decay(steps, 2.3, 0.001, 20) * noise(rng, steps) + burst


def growing_noise(rng, steps):
    return decay(steps, 2.3, 0.5, 60) * np.exp(np.linspace(0, 1.5, steps) * rng.normal(size=steps))


def single_spikes(rng, steps):
    losses = decay(steps, 2.3, 0.2, 30) * noise(rng, steps)
    losses[rng.choice(np.arange(60, steps), 3, replace=False)] *= 100
    return losses


def plateau(rng, steps):
    return 2.3 + rng.normal(0, 0.02, steps)


def constant(rng, steps):
    return np.full(steps, rng.choice([-1.0, 0.0, 0.7]))


def steps_of_rate(rng, steps):
    """The learning rate is lowered twice."""
    return np.repeat([1.0, 0.3, 0.1], steps // 3 + 1)[:steps] * noise(rng, steps, 0.3)


def growing_sequences(rng, steps):
    """A summed loss over ever longer sequences, each length learned for a while."""
    stage, place = np.arange(steps) // 50, np.arange(steps) % 50
    return 10 * (1 + stage) * (1 + 0.5 * np.exp(-place / 20)) * noise(rng, steps, 0.1)


def huge_start(rng, steps):
    return (decay(steps, 3, 1, 50) + 1e4 * np.exp(-np.arange(steps) / 3)) * noise(rng, steps)


def warmed_up(rng, steps):
    """Nothing moves in the warm-up, then it falls."""
    return np.concatenate([np.full(50, 2.3), decay(steps - 50, 2.3, 0.1, 60)]) * noise(rng, steps, 0.1)


HEALTHY = {
    make.__name__: make
    for make in (
        falling, autocorrelated, batch_of_one, heavy_tailed, lognormal_two, converged, exact_zero, poisson, flow,
        heavy_negative, warm_restarts, curriculum, sorted_classes, generator_of_a_gan, discriminator_of_a_gan,
        alternating_batches, fading_term, rising_weight, values_of_an_agent, slingshot, growing_noise, single_spikes,
        plateau, constant, steps_of_rate, growing_sequences, huge_start, warmed_up,
    )
}  # fmt: skip
