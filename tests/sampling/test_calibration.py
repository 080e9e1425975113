"""Calibration of confidences: the error, and the temperatures that lower it."""

import numpy as np
import pytest

from deepinfer_jax.sampling.calibration import expected_calibration_error, fit_temperatures, survival_of


def blocks(count: int, temperatures: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are too large by these factors, and how many drafts of each block were accepted."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0.8, 1.2, (count, len(temperatures)))
    is_accepted = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    return honest * np.array(temperatures), np.cumprod(is_accepted, axis=1).sum(axis=1)


def errors_of(z: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray) -> list[float]:
    survival = survival_of(z, temperatures)
    return [expected_calibration_error(survival[:, i], accepted > i) for i in range(z.shape[1])]


def test_error_of_a_case_by_hand():
    # Bins of 1/4: two of 0.1 and 0.2 with one hit, one of 0.9 with a hit, one of 1.0 (in the last bin) without.
    confidences, outcomes = np.array([0.1, 0.2, 0.9, 1.0]), np.array([True, False, True, False])
    assert expected_calibration_error(confidences, outcomes, num_bins=4) == pytest.approx((0.7 + 0.9) / 4)


def test_error_of_certainty():
    assert expected_calibration_error(np.ones(5), np.ones(5, bool)) == 0.0
    assert expected_calibration_error(np.ones(5), np.zeros(5, bool)) == 1.0
    assert expected_calibration_error(np.full(4, 0.5), np.array([True, False, True, False])) == 0.0


def test_survival_is_the_product_of_sigmoids():
    z = np.array([[0.3, -2.0, 800.0], [-900.0, 0.0, 1.0]])
    with np.errstate(over="ignore"):
        want = np.cumprod(1 / (1 + np.exp(-z / np.array([1.0, 2.0, 0.5]))), axis=1)
    np.testing.assert_allclose(survival_of(z, np.array([1.0, 2.0, 0.5])), want, rtol=1e-12, atol=1e-15)


def test_fit_lowers_the_error_of_overconfident_logits():
    factors = [3.0, 2.0, 2.5, 1.5, 4.0]
    z, accepted = blocks(20_000, factors)
    temperatures = fit_temperatures(z, accepted)
    raw, fitted = errors_of(z, accepted, np.ones(5)), errors_of(z, accepted, temperatures)
    assert all(after < before / 3 for before, after in zip(raw, fitted, strict=True))
    assert max(fitted) < 0.02
    # Early places have most data: there the factors themselves are found, one step of the grid (1.122) apart at most.
    np.testing.assert_allclose(temperatures[:2], factors[:2], rtol=0.13)


def test_fit_leaves_calibrated_logits_alone():
    z, accepted = blocks(50_000, [1.0, 1.0, 1.0])
    assert np.abs(np.log(fit_temperatures(z, accepted))).max() < np.log(1.13)


def test_fit_is_sequential():
    """A later place changes nothing before it."""
    z, accepted = blocks(2_000, [2.0, 0.5, 3.0])
    whole = fit_temperatures(z, accepted)
    part = fit_temperatures(z[:, :2], np.minimum(accepted, 2))
    np.testing.assert_array_equal(whole[:2], part)


def test_equally_good_temperatures_give_the_one_nearest_to_one():
    assert fit_temperatures(np.zeros((4, 1)), np.array([0, 1, 0, 1]))[0] == 1.0


@pytest.mark.parametrize(
    "z, accepted, text",
    [
        (np.zeros((0, 2)), np.zeros(0, int), "no blocks"),
        (np.array([[0.0, np.nan]]), np.array([1]), "not finite"),
        (np.zeros((1, 2)), np.array([3]), "a block has 0..2"),
        (np.zeros((1, 2)), np.array([-1]), "a block has 0..2"),
    ],
)
def test_data_that_do_not_fit_are_refused(z, accepted, text):
    with pytest.raises(ValueError, match=text):
        fit_temperatures(z, accepted)


@pytest.mark.parametrize(
    "confidences, text", [([], "no confidences"), ([1.5], "outside 0..1"), ([np.nan], "outside 0..1")]
)
def test_confidences_that_are_no_chances_are_refused(confidences, text):
    with pytest.raises(ValueError, match=text):
        expected_calibration_error(np.array(confidences, np.float64), np.zeros(len(confidences), bool))
