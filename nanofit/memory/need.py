"""What a step needs: as it is written down or, where that does not reach, simulated."""

from nanofit.memory.course import Course, Need
from nanofit.memory.ledger import EvaluationNeed, WrittenNeed, covers, write_down
from nanofit.memory.setup import Setup


def need_of(setup: Setup, *, is_simulated: bool = False) -> Need:
    """What any micro-batch needs."""
    if covers(setup) and not is_simulated:
        return WrittenNeed(setup)
    from nanofit.memory.simulate import simulated_need  # and torch, which takes seconds to load

    return simulated_need(setup)


def evaluation_need(setup: Setup) -> Need:
    """What an eager evaluation needs besides the weights, in any micro-batch."""
    return EvaluationNeed(setup)


def course_of(setup: Setup, micro_batch_size: int, *, is_simulated: bool = False) -> Course:
    """What a step allocates and frees, in order."""
    if covers(setup) and not is_simulated:
        return write_down(setup, micro_batch_size)
    from nanofit.memory.simulate import simulate

    return simulate(setup, micro_batch_size)


def components_of(setup: Setup, micro_batch_size: int) -> dict[str, int] | None:
    """A step's peak by what it is for, in bytes; None where that would have to be simulated."""
    if not covers(setup):
        return None
    return dict(write_down(setup, micro_batch_size).components_at_peak())
