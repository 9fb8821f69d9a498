"""Spikes, trends, shares and signs: seen where they are, silent where there is but noise."""

import json
import math

import numpy as np
import pytest

from safe_trainer.utils.statistics import SpikeTest, location_and_spread, proportion_test, sign_test, trend


def spikes(values, **options):
    test = SpikeTest(**options)
    return [index for index, value in enumerate(values) if test.add(float(value))]


def test_location_and_spread_do_not_mind_wild_values():
    rng = np.random.default_rng(0)
    values = rng.normal(5, 2, 1001)
    values[:300] = 1e9
    middle, spread = location_and_spread(values.tolist())
    assert 5 < middle < 7
    assert 1.5 < spread < 6
    assert location_and_spread([3.0]) == (3.0, 0.0)
    with pytest.raises(ValueError, match="at least one value"):
        location_and_spread([])


LEVELS = {
    "positive": lambda rng: 2 * np.exp(0.2 * rng.normal(size=300)),
    "near_zero": lambda rng: 1e-7 * np.exp(0.2 * rng.normal(size=300)),
    "negative": lambda rng: -236 + 3 * rng.normal(size=300),
    "across_zero": lambda rng: 0.5 * rng.normal(size=300),
    "falling": lambda rng: 2 * np.exp(-np.arange(300) / 60 + 0.2 * rng.normal(size=300)),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", LEVELS)
def test_a_spike_is_seen_at_any_level_and_noise_is_not(level, seed):
    values = LEVELS[level](np.random.default_rng(seed))
    assert spikes(values) == []
    middle, spread = location_and_spread(values[120:200].tolist())
    values[200] = middle + max(40 * spread, 9 * abs(middle) if level != "negative" else 0)
    assert spikes(values) == [200]


def test_spikes_stay_out_of_the_window():
    """Half of the values are spikes for a hundred steps: the bound does not follow them."""
    values = np.exp(0.1 * np.random.default_rng(0).normal(size=400))
    values[200:300:2] = 50
    assert spikes(values) == list(range(200, 300, 2))


def test_a_new_level_is_taken_up_by_a_restart():
    test = SpikeTest()
    for value in np.exp(0.1 * np.random.default_rng(0).normal(size=100)):
        test.add(float(value))
    assert test.add(10.0)
    test.restart([10.0 + 0.01 * k for k in range(40)])
    assert not test.add(10.5)
    assert test.add(30.0)
    test.restart([1.0])
    assert not test.add(1e9)  # one value is no past


def test_the_first_stretch_and_a_constant_curve_have_no_spikes():
    assert spikes([1e9 if k == 20 else 1.0 for k in range(32)]) == []
    assert spikes([-1.0] * 100 + [5.0]) == []
    assert spikes([0.0] * 100 + [5.0]) == []
    assert spikes([1.0] * 100 + [1.9, 2.1]) == [101]


def test_a_rise_too_small_to_matter_is_clean():
    test = SpikeTest()
    test.least_rise = 0.1
    for _ in range(64):
        test.add(1e-6)
    assert not test.add(0.09)
    assert test.add(0.2)


def test_wide_tails_make_it_stricter():
    rng = np.random.default_rng(1)
    assert spikes(np.exp(2 * rng.normal(size=2000))) == []
    assert len(spikes(np.exp(0.1 * rng.normal(size=2000)) * np.where(np.arange(2000) % 100 == 99, 3, 1))) == 20


def test_the_state_of_a_spike_test_goes_through_json_but_for_infinity():
    rng = np.random.default_rng(0)
    values = [float(value) for value in np.exp(rng.normal(size=300) * 0.2)]
    values[250] = 99.0
    whole, parts = SpikeTest(), SpikeTest()
    seen = [whole.add(value) for value in values]
    first = [parts.add(value) for value in values[:101]]
    second = SpikeTest()
    second.load_state_dict(json.loads(json.dumps(parts.state_dict())))
    assert first + [second.add(value) for value in values[101:]] == seen
    assert second.limit == whole.limit
    assert sum(seen) == 1


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="stretch must be at least 4"):
        SpikeTest(stretch=3)


# --- trend ---


def test_a_trend_is_the_least_squares_line():
    rng = np.random.default_rng(0)
    values = 3 + 0.5 * np.arange(50) + rng.normal(size=50)
    found = trend(values.tolist())
    assert found.slope == pytest.approx(np.polyfit(np.arange(50), values, 1)[0])
    assert found.probability_rising > 0.9999
    assert trend((-values).tolist()).probability_rising < 0.0001
    assert found.slope / found.standard_error == pytest.approx(
        1e200 * trend((values * 1e-200).tolist()).slope / (1e200 * trend((values * 1e-200).tolist()).standard_error)
    )


def test_exact_lines_and_too_few_values():
    assert trend([1.0, 2.0, 3.0, 4.0]).probability_rising == 1.0
    assert trend([4.0, 3.0, 2.0]).probability_rising == 0.0
    assert trend([0.3] * 10).probability_rising == 0.5
    assert trend([0.0] * 10).probability_rising == 0.5
    assert math.isfinite(trend([1e308, -1e308, 1e308, 1e308]).slope)
    with pytest.raises(ValueError, match="at least 3 values"):
        trend([1.0, 2.0])


def autocorrelated(rng, count, memory):
    values = np.zeros(count + 100)
    for index in range(1, count + 100):
        values[index] = memory * values[index - 1] + rng.normal()
    return values[100:].tolist()


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
def test_autocorrelated_noise_has_a_trend_as_seldom_as_it_says(memory):
    """Without the correction, noise with a memory of 0.9 is sure of a trend at 0.99 in a third of all cases."""
    rng = np.random.default_rng(0)
    sure = [trend(autocorrelated(rng, 60, memory)).probability_rising for _ in range(500)]
    assert sum(p > 0.99 or p < 0.01 for p in sure) / 500 < 0.06
    assert 0.3 < sum(p > 0.5 for p in sure) / 500 < 0.7


def test_the_effective_size_shrinks_with_memory():
    rng = np.random.default_rng(0)
    white, slow = (trend(autocorrelated(rng, 400, memory)).effective_size for memory in (0.0, 0.9))
    assert 250 < white <= 400
    assert 5 < slow < 60


# --- proportions and signs ---


def test_proportions_are_exact():
    assert proportion_test(10, 10, 0.5) == pytest.approx(1 / 1024)
    assert proportion_test(8, 10, 0.5) == pytest.approx((45 + 10 + 1) / 1024)
    assert proportion_test(0, 10, 0.1) == 1.0
    assert proportion_test(1, 10, 0.0) == 0.0
    assert proportion_test(10, 10, 1.0) == 1.0
    assert proportion_test(60_000, 100_000, 0.5) < 1e-100
    with pytest.raises(ValueError, match="successes must lie in"):
        proportion_test(3, 2, 0.5)


def test_the_sign_test_leaves_out_zeros():
    assert sign_test([1, 2, 0, 3, 0]) == pytest.approx(1 / 8)
    assert sign_test([-1, 1]) == pytest.approx(3 / 4)
    assert sign_test([0, 0]) == 1.0
