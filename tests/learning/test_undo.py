"""An undone update against the state before it, copied by other means."""

import copy
import sys

import pytest
import torch
from torch.utils._pytree import tree_flatten

from nanofit.learning.optim import build_optimizer
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.device import describe_device
from nanofit.run.spikes import SkipWatch
from nanofit.settings.config import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")

if sys.platform == "linux":
    import resource


@pytest.fixture
def memory():
    """Of a process whose memory can run out, with room for copies."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**46, limits[1]))
    memory = describe_device("cpu").memory()
    memory.forget_peak()
    torch.ones(2**26)
    yield memory
    resource.setrlimit(resource.RLIMIT_DATA, limits)


class Learner:
    def __init__(self, bits: int, memory):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.LayerNorm(512))
        self.optimizer = build_optimizer(self.model, TrainConfig(), bits=bits)
        self.is_interrupted = False
        self.optimizer.register_step_post_hook(self._interrupt)  # when all is changed
        self.undo = UpdateUndo(self.optimizer, memory)
        self.optimizer.register_step_pre_hook(self._watch)

    def update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
            self.optimizer.step()

    def state(self) -> list:
        """All that a checkpoint would hold, in a list of copies."""
        content = self.model.state_dict(), self.optimizer.state_dict()
        return tree_flatten(copy.deepcopy(content))[0]

    def _interrupt(self, *_):
        if self.is_interrupted:
            raise torch.OutOfMemoryError("no room")

    def _watch(self, optimizer, *_):
        optimizer.param_groups[0]["seen"] = torch.randn(1)  # as a watch for spikes remembers norms


@pytest.mark.parametrize("updates_before", [0, 2])
@pytest.mark.parametrize("bits", [32, 8])
def test_interrupted_update_leaves_nothing_behind(memory, bits, updates_before):
    if bits == 8:
        pytest.importorskip("torchao")
    learner = Learner(bits, memory)
    for _ in range(updates_before):
        learner.update()
    before = learner.state()
    learner.is_interrupted = True
    with pytest.raises(torch.OutOfMemoryError):
        learner.update()
    assert not are_equal(learner.state(), before)
    assert learner.undo.undo()
    assert are_equal(learner.state(), before)


def test_finished_update_stays_when_the_next_fails_before_it_begins(memory):
    learner = Learner(32, memory)
    learner.update()
    learner.undo.forget()
    after = learner.state()
    assert learner.undo.undo()
    assert are_equal(learner.state(), after)


@pytest.mark.parametrize("why", ["no room", "no limit"])
def test_without_room_or_limit_nothing_is_copied(memory, why):
    if why == "no room":
        memory.forget_peak()
    else:
        resource.setrlimit(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1:] * 2)
    learner = Learner(32, memory)
    learner.is_interrupted = True
    with pytest.raises(torch.OutOfMemoryError):
        learner.update()
    assert not learner.undo.undo()


def test_copies_leave_room_for_what_an_update_needs_itself(memory):
    """8-bit moments are in 32 bits for a while, two at a time, those of the largest weight."""
    pytest.importorskip("torchao")
    learner = Learner(8, memory)
    largest = max(parameter.nbytes for parameter in learner.model.parameters())
    assert learner.optimizer.workspace_bytes == 2 * largest
    memory.vacated_bytes = lambda: 2 * largest  # enough for the copies, but not for both
    learner.is_interrupted = True
    with pytest.raises(torch.OutOfMemoryError):
        learner.update()
    assert not learner.undo.undo()


@pytest.mark.parametrize("interrupted", [1, 2], ids=["usual norm", "spike"])
def test_an_update_done_again_counts_once_in_the_watch_for_spikes(memory, interrupted):
    """Against the same updates undisturbed; the watch is there first, as in a run."""
    remembered = []
    for at in (None, interrupted):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=True)
        watch, undo = SkipWatch(optimizer), UpdateUndo(optimizer, memory)
        for number, gradient in enumerate([1.0, 2.0, 100.0, 1.5]):
            weight.grad = torch.full((3,), gradient)
            optimizer.grad_norm = weight.grad.norm()
            optimizer.step()
            if number == at:
                assert undo.undo()
                optimizer.step()
            undo.forget()
        assert watch.look(None, None).skipped == 1
        remembered.append(optimizer.param_groups[0]["spike_memory"])
    assert torch.equal(*remembered)


def are_equal(some: list, others: list) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(some, others, strict=True)
    )
