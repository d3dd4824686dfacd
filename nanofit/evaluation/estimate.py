"""A mean and how sure it is."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A ratio of two sums over independent observations.

    Of a document: its nats and its tokens. Tokens are no observations: those of one document are
    alike. Of a question: whether the answer was right, and 1.
    """

    amounts: np.ndarray
    weights: np.ndarray

    @property
    def value(self) -> float:
        return float(self.amounts.sum() / self.weights.sum())

    @property
    def error(self) -> float | None:
        """The standard error; None where there is but one observation."""
        count = len(self.weights)
        if count < 2:
            return None
        deviations = self.amounts - self.value * self.weights
        variance = count / (count - 1) * np.square(deviations).sum()
        return float(np.sqrt(variance) / self.weights.sum())

    def less(self, other: "Estimate") -> "Estimate | None":
        """The difference, if both are of the same observations, which it pairs."""
        if not np.array_equal(self.weights, other.weights):
            return None
        return Estimate(self.amounts - other.amounts, self.weights)
