"""The chunked loss against the textbook's in float64, and against its promises on work and bytes.

1200 rows of width 96 are several chunks, the last one short.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nanofit.learning.chunks import chunk_rows
from nanofit.learning.loss import _add_product_, chunked_loss, full_loss, soft_capped, token_losses

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


@pytest.mark.parametrize(("has_bias", "cap"), [(False, None), (True, None), (True, 15.0)])
def test_losses_of_tokens_are_what_the_textbook_means(has_bias, cap):
    hidden, weight, targets, bias = head(torch.float64, 30.0 if cap else 1.0, has_bias)
    losses = token_losses(*map(as_float32, (hidden, weight, targets, bias)), cap)
    each = [
        full_loss_in_float64(hidden[[row]], weight, targets[[row]], bias, cap)
        for row in range(0, ROWS, 7)
        if targets[row] >= 0
    ]
    kept = losses[::7][targets[::7] >= 0]
    torch.testing.assert_close(kept.double(), torch.stack(each), rtol=1e-5, atol=1e-6)
    assert (losses[targets < 0] == 0).all()
    mean = losses.double().sum() / (targets >= 0).sum()
    exact = full_loss_in_float64(hidden, weight, targets, bias, cap)
    torch.testing.assert_close(mean, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cap", [None, 15.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_tokens_mean_the_loss_of_an_evaluation(dtype, cap):
    hidden, weight, targets, bias = head(spread=3.0)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = chunked_loss(hidden, weight, targets, bias, cap)
        losses = token_losses(hidden, weight, targets, bias, cap)
    assert losses.dtype == torch.float32
    assert (losses.sum() / (targets >= 0).sum()).item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_opaque_op_returns_new_tensors_of_the_shapes_it_states(with_gradients):
    arguments = (*inputs(), torch.float32, with_gradients)
    checks = ("test_schema", "test_faketensor")  # what it returns is neither an input nor shared
    torch.library.opcheck(torch.ops.nanofit.loss_sum, arguments, test_utils=checks)


def test_simulation_sees_the_chunk_buffers():
    with FakeTensorMode(), Allocations() as seen:
        differentiate(chunked_loss, *inputs(), autocast=torch.bfloat16)
    assert seen.largest == chunk_rows(WIDTH) * VOCABULARY * 4


def test_losses_of_tokens_hold_no_more_logits_than_a_chunk_has():
    with Allocations() as seen:
        token_losses(*inputs())
    assert seen.largest == chunk_rows(WIDTH) * VOCABULARY * 4


class Allocations(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


# a head with a bias and softly capped logits


@STAGES
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4], ids=["small", "capped", "huge"])
@pytest.mark.parametrize(("has_bias", "cap"), [(True, 15.0), (True, None), (False, 15.0)])
def test_bias_and_cap_have_the_loss_and_gradients_of_their_formula(stage, spread, has_bias, cap):
    """Of logits with this standard deviation, to 1e-5 of the norm of each.

    Huge ones are rounded to more than that in float32: then as near as the full loss.
    """
    if cap is None and spread > 100:
        pytest.skip("a softmax of huge logits is a matter of rounding")
    exact = differentiate(full_loss_in_float64, *head(torch.float64, spread, has_bias), cap=cap)
    chunked = differentiate(loss_of(stage), *head(torch.float32, spread, has_bias), cap=cap)
    full = differentiate(full_loss, *head(torch.float32, spread, has_bias), cap=cap)
    assert len(chunked) == 3 + has_bias
    for ours, plain, truth in zip(chunked, full, exact, strict=True):
        nearness = 1e-5 if spread < 1e4 else 1.05 * distance(plain, truth) + 1e-6
        assert distance(ours, truth) < nearness


@STAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_half_precision_with_a_cap_is_as_near_as_the_full_loss(stage, dtype, spread):
    exact = differentiate(full_loss_in_float64, *head(torch.float64, spread), cap=15.0)
    chunked = differentiate(loss_of(stage), *head(spread=spread), cap=15.0, autocast=dtype)
    full = differentiate(full_loss, *head(spread=spread), cap=15.0, autocast=dtype)
    for ours, plain, truth in zip(chunked, full, exact, strict=True):
        assert ours.dtype == torch.float32
        assert distance(ours, truth) < max(1.1 * distance(plain, truth), 1e-4)


@STAGES
def test_logits_too_large_for_float16_are_capped_all_the_same(stage):
    hidden, weight, targets, bias = head(spread=2e4)
    with torch.autocast("cpu", torch.float16):
        logits = F.linear(hidden, weight, bias)
    assert logits.isinf().any()
    loss, *gradients = differentiate(
        loss_of(stage), hidden, weight, targets, bias, cap=15.0, autocast=torch.float16
    )
    exact = full_loss_in_float64(hidden.double(), weight.double(), targets, bias.double(), 15.0)
    assert loss == pytest.approx(exact.item(), rel=1e-3)
    assert all(gradient.isfinite().all() for gradient in gradients)


@STAGES
def test_with_bias_and_cap_ignored_rows_are_as_if_not_there(stage):
    hidden, weight, targets, bias = head(spread=30.0)
    kept = targets >= 0
    hidden[~kept] = float("inf")
    loss, d_hidden, *others = differentiate(loss_of(stage), hidden, weight, targets, bias, cap=15.0)
    exact = differentiate(
        full_loss_in_float64,
        hidden[kept].double(),
        weight.double(),
        targets[kept],
        bias.double(),
        cap=15.0,
    )
    for ours, truth in zip((loss, d_hidden[kept], *others), exact, strict=True):
        assert distance(ours, truth) < 1e-5
    assert not d_hidden[~kept].any()


@STAGES
def test_evaluation_with_bias_and_cap_gives_the_loss_of_training(stage):
    loss, *_ = differentiate(loss_of(stage), *head(spread=30.0), cap=15.0)
    with torch.no_grad():
        assert loss_of(stage)(*head(spread=30.0), 15.0) == loss


def test_no_logit_gets_past_the_cap_and_small_ones_stay():
    logits = torch.tensor([-1e6, -15.0, -1e-3, 0.0, 1e-3, 15.0, 1e6])
    expected = [-15.0, -15 / 2**0.5, -1e-3, 0.0, 1e-3, 15 / 2**0.5, 15.0]
    torch.testing.assert_close(soft_capped(logits, 15.0), torch.tensor(expected))
    assert soft_capped(logits, None) is logits


@pytest.mark.slow
@pytest.mark.parametrize("with_gradients", [True, False])
def test_opaque_op_with_bias_and_cap_states_its_shapes_and_work(with_gradients):
    hidden, weight, targets, bias = head()
    arguments = (hidden, weight, targets, torch.float32, with_gradients, bias, 15.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.nanofit.loss_sum, arguments, test_utils=checks)
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as stated:
        torch.ops.nanofit.loss_sum(*arguments)
    products = 3 if with_gradients else 1
    assert stated.get_total_flops() == products * FLOPS_OF_A_PRODUCT


def head(dtype: torch.dtype = torch.float32, spread: float = 1.0, has_bias: bool = True):
    """Inputs and a bias that give logits of this standard deviation, more or less."""
    hidden, weight, targets = inputs(dtype)
    bias = 0.3 * spread * torch.randn(VOCABULARY).to(dtype) if has_bias else None
    return hidden, spread * weight, targets, bias


def as_float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.float() if tensor is not None and tensor.is_floating_point() else tensor


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
    torch._dynamo.reset()  # it gives up after compiling a function for eight kinds of arguments
    return torch.compile(chunked_loss, dynamic=False, fullgraph=True)


def full_loss_in_float64(hidden, weight, targets, bias=None, cap=None):
    logits = F.linear(hidden, weight, bias)
    if cap is not None:
        logits = cap * logits / (logits**2 + cap**2).sqrt()
    return F.cross_entropy(logits, targets.clamp(min=-1), ignore_index=-1)


def differentiate(
    loss, hidden, weight, targets, bias=None, *, cap=None, autocast: torch.dtype = torch.float32
):
    """The loss and its gradients, in float16 through the scale that GradScaler starts with."""
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    scale = 65536.0 if autocast == torch.float16 else 1.0
    with torch.autocast("cpu", autocast, enabled=autocast != torch.float32):
        value = loss(*leaves[:2], targets, *(leaves[2:] or [None]), cap)
    (value * scale).backward()
    return value.detach(), *(leaf.grad / scale for leaf in leaves)


def distance(tensor: torch.Tensor, truth: torch.Tensor) -> float:
    return ((tensor.double() - truth).norm() / truth.norm()).item()
