"""The chunked loss against the textbook's in float64, and against its promises on work and bytes.

1200 rows of width 96 are several chunks, the last one short.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nanofit.loss import _add_product_, chunk_rows, chunked_loss, full_loss

ROWS, WIDTH, VOCABULARY = 1200, 96, 3001
FLOPS_OF_A_PRODUCT = 2 * ROWS * WIDTH * VOCABULARY
STAGES = pytest.mark.parametrize("stage", ["eager", "compiled"])


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_as_near_to_the_textbooks_as_the_full_loss(stage, dtype):
    exact = differentiate(full_loss_in_float64, *inputs(torch.float64))
    chunked = differentiate(loss_of(stage), *inputs(), autocast=dtype)
    full = differentiate(full_loss, *inputs(), autocast=dtype)
    for ours, plain, truth in zip(chunked, full, exact, strict=True):
        assert ours.dtype == torch.float32
        if dtype == torch.float32:
            assert distance(ours, truth) < 1e-6
        # The loss is the mean of many rounding errors: which of the two is nearer is chance.
        assert distance(ours, truth) < max(1.05 * distance(plain, truth), 1e-6)


@STAGES
def test_ignored_targets_are_as_if_their_rows_were_not_there(stage):
    hidden, weight, targets = inputs()
    kept = targets >= 0
    assert 0 < kept.sum() < ROWS
    hidden[~kept] = float("inf")  # a row that does not count may hold anything finite or not
    loss, d_hidden, d_weight = differentiate(loss_of(stage), hidden, weight, targets)
    alone = differentiate(full_loss, hidden[kept], weight, targets[kept])
    torch.testing.assert_close((loss, d_hidden[kept], d_weight), alone)
    assert not d_hidden[~kept].any()


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_gives_the_loss_of_training(stage, dtype):
    hidden, weight, targets = inputs()
    loss, *_ = differentiate(loss_of(stage), hidden, weight, targets, autocast=dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert loss_of(stage)(hidden, weight, targets) == loss


def test_float16_survives_a_chunk_that_is_all_one_token():
    """The largest gradient there can be: every row adds its whole input to one row of weight."""
    hidden = torch.full((1024, 1024), 1024**0.5)  # no row of a layer norm has larger elements
    weight = torch.zeros(8, 1024)
    targets = torch.full((1024,), 3)
    assert chunk_rows(1024) == 1024
    _, _, d_weight = differentiate(chunked_loss, hidden, weight, targets, autocast=torch.float16)
    expected = differentiate(full_loss, hidden, weight, targets)[2]
    torch.testing.assert_close(d_weight, expected, rtol=1e-3, atol=0)


def test_float16_survives_a_long_chunk_that_is_all_one_token():
    """As long as compiled code makes them: its sum is too large for float16."""
    rows = chunk_rows(1024, fused=True)
    left = torch.ones(8, rows, dtype=torch.float16)
    right = torch.full((rows, 1024), 1024**0.5, dtype=torch.float16)
    total = torch.full((8, 1024), float("nan"))
    for count in (1, 2):  # the first one is written over whatever is there
        _add_product_(total, left, right, is_first=count == 1)
        expected = count * (left.double() @ right.double())
        assert expected.max() > torch.finfo(torch.float16).max
        torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=0)


def test_backward_twice_adds_up_or_is_refused():
    hidden, weight, targets = inputs()
    hidden.requires_grad_()
    loss = chunked_loss(hidden, weight, targets)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_each_product_is_done_once_and_in_evaluation_only_the_first():
    hidden, weight, targets = inputs()
    with FlopCounterMode(display=False) as training:
        differentiate(chunked_loss, hidden, weight, targets)
    with FlopCounterMode(display=False) as evaluation:
        chunked_loss(hidden, weight, targets)
    assert training.get_total_flops() == 3 * FLOPS_OF_A_PRODUCT
    assert evaluation.get_total_flops() == FLOPS_OF_A_PRODUCT
    for with_gradients, counted in ((True, training), (False, evaluation)):
        with FakeTensorMode(), FlopCounterMode(display=False) as stated:
            torch.ops.nanofit.loss_sum(*inputs(), torch.float32, with_gradients)
        assert stated.get_total_flops() == counted.get_total_flops()


def test_simulation_sees_the_chunk_buffers():
    class Allocations(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.untyped_storage().nbytes())
            return result

    with FakeTensorMode(), Allocations() as seen:
        differentiate(chunked_loss, *inputs(), autocast=torch.bfloat16)
    assert seen.largest == chunk_rows(WIDTH) * VOCABULARY * 4


def inputs(dtype: torch.dtype = torch.float32):
    """Hidden states as a layer norm leaves them, a weight, and targets of which some are < 0."""
    torch.manual_seed(3)
    hidden = F.layer_norm(torch.randn(ROWS, WIDTH), (WIDTH,)).to(dtype)
    weight = 0.1 * torch.randn(VOCABULARY, WIDTH).to(dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    targets[:40], targets[-7:] = -1, -100
    return hidden, weight, targets


def loss_of(stage: str):
    if stage == "eager":
        return chunked_loss
    return torch.compile(chunked_loss, dynamic=False, fullgraph=True)


def full_loss_in_float64(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets.clamp(min=-1), ignore_index=-1)


def differentiate(loss, hidden, weight, targets, *, autocast: torch.dtype = torch.float32):
    """The loss and its gradients, in float16 through the scale that GradScaler starts with."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    scale = 65536.0 if autocast == torch.float16 else 1.0
    with torch.autocast("cpu", autocast, enabled=autocast != torch.float32):
        value = loss(hidden, weight, targets)
    (value * scale).backward()
    return value.detach(), hidden.grad / scale, weight.grad / scale


def distance(tensor: torch.Tensor, truth: torch.Tensor) -> float:
    return ((tensor.double() - truth).norm() / truth.norm()).item()
