"""One step and one evaluation against the textbook's formulas."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import evaluate, train_step
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=31, bias=True)
LEARN = TrainConfig(learning_rate=1e-2, beta1=0.8, beta2=0.9, weight_decay=0.3)


def test_step_equals_adamw_written_out_on_the_undivided_batch():
    idx, targets = batch(6)
    model, expected = GPT(SHAPE), GPT(SHAPE)
    expected.load_state_dict(model.state_dict())
    cut = [MicroBatch(idx[a:b], targets[a:b], (b - a) / 6) for a, b in ((0, 1), (1, 3), (3, 6))]
    loss, norm = step(model, cut, lr=5e-3, grad_clip=0.1)

    whole = expected(idx, targets)
    whole.backward()
    whole_norm = math.sqrt(sum(p.grad.square().sum().item() for p in expected.parameters()))
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert norm.item() == pytest.approx(whole_norm, rel=1e-5)
    for name, parameter in expected.named_parameters():
        gradient = parameter.grad * (0.1 / whole_norm)
        decay = 0.3 if parameter.dim() >= 2 else 0.0
        # After one step both moments, bias-corrected, are the gradient and its square.
        update = gradient / (gradient.abs() + 1e-8)
        wanted = parameter * (1 - 5e-3 * decay) - 5e-3 * update
        torch.testing.assert_close(model.get_parameter(name), wanted, atol=2e-5, rtol=0)


def test_gradients_are_not_clipped_below_the_limit_or_without_one():
    idx, targets = batch(2)
    cut = [MicroBatch(idx, targets, 1.0)]
    results = []
    for grad_clip in (0.0, 1e6):
        torch.manual_seed(9)
        model = GPT(SHAPE)
        step(model, cut, lr=1e-2, grad_clip=grad_clip)
        results.append(model.state_dict())
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name])


def test_float16_step_with_overflow_changes_nothing_but_the_scale():
    device = describe_device("cpu", "float16")
    model, (idx, targets) = GPT(SHAPE), batch(2)
    optimizer, scaler = build_optimizer(model, LEARN), device.grad_scaler()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler._init_scale = 2.0**40  # overflows float16 in the first backward pass
    arguments = {"device": device, "ranks": Ranks(), "lr": 1e-2, "grad_clip": 1.0, "seed": 0}
    train_step(model, optimizer, scaler, [MicroBatch(idx, targets, 1.0)], **arguments)
    assert scaler.get_scale() == 2.0**39
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    while scaler.get_scale() > 2.0**10:
        scaler.update(2.0**10)
    train_step(model, optimizer, scaler, [MicroBatch(idx, targets, 1.0)], **arguments)
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_evaluation_is_the_mean_over_sequences_without_dropout():
    model = GPT(GPTConfig(**{**vars(SHAPE), "dropout": 0.5}))
    idx, targets = batch(5)
    one_by_one = [model.eval()(idx[i : i + 1], targets[i : i + 1]).item() for i in range(5)]
    model.train()
    cut = [MicroBatch(idx[:3], targets[:3], 3 / 5), MicroBatch(idx[3:], targets[3:], 2 / 5)]
    device = describe_device("cpu")
    assert evaluate(model, cut, device=device, ranks=Ranks()) == pytest.approx(sum(one_by_one) / 5)
    assert model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_step_never_waits_for_the_device(dtype):
    """A fake tensor has no value, so reading one, as a synchronisation would, raises."""
    device = describe_device("cpu", dtype)
    with FakeTensorMode():
        model = GPT(SHAPE)
        optimizer, scaler = build_optimizer(model, LEARN), device.grad_scaler()
        cut = [MicroBatch(*batch(2), 0.5), MicroBatch(*batch(2), 0.5)]
        arguments = {"device": device, "ranks": Ranks(), "lr": 1e-2, "grad_clip": 1.0, "seed": 0}
        for _ in range(2):
            loss, norm = train_step(model, optimizer, scaler, cut, **arguments)
        for number in (loss, norm):
            with pytest.raises(DataDependentOutputException):
                number.item()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 31, (size, 8)), torch.randint(0, 31, (size, 8))


def step(model: GPT, micro_batches: list[MicroBatch], *, lr: float, grad_clip: float):
    device = describe_device("cpu")
    return train_step(
        model,
        build_optimizer(model, LEARN),
        device.grad_scaler(),
        micro_batches,
        device=device,
        ranks=Ranks(),
        lr=lr,
        grad_clip=grad_clip,
        seed=0,
    )
