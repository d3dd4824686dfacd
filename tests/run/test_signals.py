"""Requests by signal, as the loop sees them."""

import os
import signal

import pytest

from nanofit.run import signals
from nanofit.run.signals import watch_for_requests


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    monkeypatch.setattr(signals, "time", clock := Clock())
    return clock


def test_what_comes_together_is_one_request_and_what_comes_later_insists(clock):
    """A cluster signals all processes, and torchrun passes on what it got."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with watch_for_requests() as requests:
            assert not requests.is_end_asked
            os.kill(os.getpid(), signal.SIGTERM)
            clock.now += 0.1
            os.kill(os.getpid(), signal.SIGTERM)
            assert requests.is_end_asked
            clock.now += 1
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signal")
def test_a_save_is_asked_for_once():
    with watch_for_requests() as requests:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (requests.take_save(), requests.take_save()) == (True, False)
        assert not requests.is_end_asked
