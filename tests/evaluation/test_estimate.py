"""Standard errors against brute force: the same many times over, from observations drawn anew."""

import numpy as np
import pytest

from nanofit.evaluation.estimate import Estimate

DOCUMENTS, DRAWS = 200, 4000


@pytest.fixture
def documents() -> tuple[np.ndarray, np.ndarray]:
    """Nats and tokens: long documents are easier, each has a difficulty of its own."""
    random = np.random.default_rng(0)
    tokens = random.lognormal(6, 1, DOCUMENTS).astype(int) + 1
    return tokens * (3 + random.normal(0, 0.4, DOCUMENTS) + 50 / (50 + tokens)), tokens


def drawn_again(statistic) -> float:
    random = np.random.default_rng(1)
    return np.std([statistic(random.integers(0, DOCUMENTS, DOCUMENTS)) for _ in range(DRAWS)])


def test_error_over_documents_is_that_of_drawing_them_again(documents):
    nats, tokens = documents
    estimate = Estimate(nats, tokens)
    assert estimate.value == nats.sum() / tokens.sum()
    bootstrapped = drawn_again(lambda chosen: nats[chosen].sum() / tokens[chosen].sum())
    assert estimate.error == pytest.approx(bootstrapped, rel=0.05)


def test_difference_pairs_documents(documents):
    nats, tokens = documents
    better = 0.98 * nats + np.random.default_rng(2).normal(0, 2, DOCUMENTS)
    difference = Estimate(better, tokens).less(Estimate(nats, tokens))
    assert difference.value == pytest.approx((better - nats).sum() / tokens.sum())
    bootstrapped = drawn_again(lambda chosen: (better - nats)[chosen].sum() / tokens[chosen].sum())
    assert difference.error == pytest.approx(bootstrapped, rel=0.05)
    assert difference.error < Estimate(nats, tokens).error / 5
    assert Estimate(nats, tokens + 1).less(Estimate(nats, tokens)) is None
    assert Estimate(nats[1:], tokens[1:]).less(Estimate(nats, tokens)) is None


def test_error_of_answers_is_the_sample_deviation_over_the_root_of_their_number():
    right = np.random.default_rng(0).integers(0, 2, 300).astype(float)
    expected = np.std(right, ddof=1) / np.sqrt(300)
    assert Estimate(right, np.ones(300)).error == pytest.approx(expected, rel=1e-12)


def test_of_one_observation_no_error_is_known():
    assert Estimate(np.array([2.5]), np.array([7])).error is None
