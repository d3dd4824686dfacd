"""Fuzzing: what is fed thousands of damaged inputs, a few hundred of them in the usual tests.

`make fuzz` runs the tests of test_fuzz_*.py with many more. The inputs are the same at each run.
"""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings


def fuzzed(function: Callable) -> Callable:
    """Give a test of hypothesis NANOFIT_FUZZ examples, by default 200."""
    return settings(
        max_examples=int(os.environ.get("NANOFIT_FUZZ", 200)),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(function)
