"""gptlite/planning/law.py and forecast.py: the fit finds the law that made the points."""

import dataclasses

import numpy as np
import pytest

from gptlite.planning.forecast import USUAL, best_parameters, fit_laws, fit_pilot
from gptlite.planning.law import REFERENCE, Law, Points, Prior, fit_law, fresh_tokens

LAW = Law(floor=1.0, a=30.0, b=200.0, alpha=0.42, beta=0.38, repeats=12.0)
# Hardly anything is known.
WEAK = Prior(0.5, 0.3, 10.0, np.log([0.4, 0.4, 10.0]), np.array([10.0, 10.0, 10.0]))
# Of a text of a million tokens, of which some models read sixteen times as many.
SIZES, TOKENS, UNIQUE = 2.0 ** np.arange(14, 20), 2.0 ** np.arange(16, 25), 1e6


def points(noise=0.0, seeds=1, key=0):
    n, d = (np.repeat(x.ravel(), seeds) for x in np.meshgrid(SIZES, TOKENS))
    unique = np.full_like(n, UNIQUE)
    chance = np.random.default_rng(key).normal(size=n.size)
    return Points(n, d, unique, LAW(n, d, unique) * (1 + noise * chance))


def test_fresh_tokens_are_those_of_muennighoff_et_al():
    """Equation 5 of section 3.1: U + U R (1 - exp(-(D/U - 1) / R)); as many as are read, up to one
    round; at most 1 + R rounds in all."""
    read = np.array([0.5, 1.0, 2.0, 8.0, 1e6])
    expected = [0.5, 1.0, 1 + 5 * (1 - np.exp(-0.2)), 1 + 5 * (1 - np.exp(-1.4)), 6.0]
    np.testing.assert_allclose(
        fresh_tokens(read * 7, np.full(5, 7.0), 5.0), np.multiply(expected, 7)
    )


def test_the_law_of_points_without_noise_is_found():
    """To what Nelder and Mead's search stops at."""
    found = fit_law(points(), WEAK)
    assert vars(found) == pytest.approx(vars(LAW), rel=1e-2)
    far = np.array([1e8]), np.array([1e10]), np.array([1e10])
    assert found(*far) == pytest.approx(LAW(*far), rel=1e-3)


def test_parabolas_would_be_wrong_where_the_law_is_not():
    """The size that is best for some compute, as `approach 2` of Hoffmann et al. finds it, from
    runs around a size that is four times too large."""
    compute, n = 6 * 2.0**19 * 2.0**22, 2.0 ** np.arange(17, 22)
    d, unique = compute / (6 * n), np.full_like(n, 1e12)
    losses = LAW(n, d, unique)
    right = best_parameters(LAW, compute, 1e12)
    square, line, _ = np.polyfit(np.log(n), losses, 2)
    assert abs(np.log(np.exp(-line / (2 * square)) / right)) > 0.05
    more = [points(), Points(n, d, unique, losses)]
    columns = (np.concatenate([vars(x)[c] for x in more]) for c in vars(more[0]))
    fitted = best_parameters(fit_law(Points(*columns), WEAK), compute, 1e12)
    assert fitted == pytest.approx(right, rel=0.02)


def test_the_best_size_is_that_of_the_formula():
    """Hoffmann et al., 2022, equation 4, where no token is read twice."""
    compute = 1e15
    ratio = (LAW.alpha * LAW.a / (LAW.beta * LAW.b)) ** (1 / (LAW.alpha + LAW.beta))
    right = ratio * (compute / 6) ** (LAW.beta / (LAW.alpha + LAW.beta))
    assert best_parameters(LAW, compute, 1e15) == pytest.approx(right, rel=0.02)


def test_a_text_that_is_read_often_wants_a_smaller_model_or_none_at_all():
    """With little text, more compute goes to parameters rather than to tokens."""
    compute = 6e14
    much, little = (best_parameters(LAW, compute, unique) for unique in (1e12, 1e6))
    assert little > 1.5 * much


def test_intervals_hold_what_they_promise():
    """12 ladders of two seeds, with a noise of 0.3 %, and a run of ten times their compute. Fewer
    than 9 of 12 are inside intervals of 95 % one time in 500."""
    at = float(SIZES[-1]), 10 * float(TOKENS[-1]), UNIQUE
    right = LAW(*(np.array([x]) for x in at))[0]
    chance = np.random.default_rng(5).normal(size=12) * 0.003
    inside = 0
    for key in range(12):
        forecast = fit_laws(points(0.003, 2, key), WEAK, draws=60).forecast(*at)
        inside += forecast.low <= right * (1 + chance[key]) <= forecast.high
        assert forecast.low < forecast.loss < forecast.high
        assert forecast.high - forecast.low < 0.1
    assert inside >= 9


def test_more_seeds_are_known_better():
    laws = fit_laws(points(0.01, 2), WEAK, draws=60)
    one, nine = (laws.forecast(2.0**17, 2.0**20, UNIQUE, seeds) for seeds in (1, 9))
    assert nine.high - nine.low < 0.6 * (one.high - one.low)


def test_without_points_to_tell_it_the_law_is_the_usual_one():
    """One loss, which the law goes through; the shares of its terms, and its powers, are those of
    the prior."""
    n, d = REFERENCE
    one = Points(*(np.array([x]) for x in (n, d, 1e12, 1.7)))
    law = fit_law(one, USUAL)
    assert law.loss(n, d, 1e12) == pytest.approx(1.7, rel=1e-3)
    assert law.floor / 1.7 == pytest.approx(USUAL.floor, abs=0.01)
    assert law.b * d**-law.beta / 1.7 == pytest.approx(USUAL.data, abs=0.01)
    assert np.log([law.alpha, law.beta, law.repeats]) == pytest.approx(USUAL.powers, abs=0.05)


def test_many_points_outweigh_a_prior_that_is_wrong():
    law = fit_law(points(), USUAL)
    n, d, unique = (np.array([x]) for x in (2.0**21, 2.0**26, 1e6))
    assert law(n, d, unique) == pytest.approx(LAW(n, d, unique), rel=0.01)


def test_a_pilot_tells_the_level_of_a_text_and_the_prior_how_sure_that_is():
    sure = dataclasses.replace(USUAL, spread=0.001, spreads=USUAL.spreads / 100)

    def forecast(loss, prior):
        pilot = Points(*(np.array([x]) for x in (7e4, 3e5, 1e6, loss)))
        return fit_pilot(pilot, prior).forecast(4e5, 3e6, 1e6)

    low, high, exact = forecast(1.5, USUAL), forecast(3.0, USUAL), forecast(1.5, sure)
    assert high.loss == pytest.approx(2 * low.loss, rel=0.01)
    assert low.low < low.loss < low.high < 1.5
    assert exact.loss == pytest.approx(low.loss, rel=0.01)
    # What is left is the chance of the pilot, 2 %, to both sides.
    width = (exact.high - exact.low) / exact.loss
    assert width == pytest.approx(2 * 1.96 * 0.02, rel=0.3)
    assert low.high - low.low > 2 * (exact.high - exact.low)
