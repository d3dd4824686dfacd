"""8-bit AdamW against the 32-bit one, and its moments through a checkpoint."""

import io
import sys

import pytest
import torch

from model import GPT
from nanofit.learning.moments import adamw_8bit, adamw_32bit
from nanofit.learning.optim import build_optimizer
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16, vocab_size=64)
LEARN = TrainConfig(learning_rate=3e-3, beta2=0.95)


@pytest.fixture
def _uncompiled():
    """torchao compiles its step, for a minute on a CPU; the arithmetic is the same without."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


needs_torchao = pytest.mark.usefixtures("_uncompiled")


@needs_torchao
def test_8bit_run_learns_as_the_32bit_one_does():
    first, last = (train(*begin(bits), range(40))[::39] for bits in (8, 32))
    assert first == pytest.approx(last, rel=0.02)
    assert first[1] < 0.7 * first[0]


@needs_torchao
@pytest.mark.parametrize("eps", [1e-10 / 524_288, 1e-8])
def test_8bit_updates_stay_bounded_however_small_eps_is(eps):
    """Rows that have a gradient now and then, as those of an embedding have."""
    weights = [torch.nn.Parameter(torch.zeros(64, 256)) for _ in range(2)]
    settings = {"lr": 1.0, "betas": (0.8, 0.95), "eps": eps, "weight_decay": 0.0}
    kinds = zip((adamw_8bit, adamw_32bit), weights, strict=True)
    optimizers = [kind([{"params": [weight]}], **settings) for kind, weight in kinds]
    for _ in range(6):
        gradient = 1e-4 * torch.randn(64, 256)
        gradient[torch.rand(64) < 0.5] = 0
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    narrow, wide = (weight.detach() for weight in weights)
    assert narrow.abs().max() < 3 * wide.abs().max()
    assert (narrow - wide).norm() < 0.1 * wide.norm()


@needs_torchao
def test_moments_take_a_byte_each_and_a_scale_per_256():
    model, optimizer = begin(8)
    train(model, optimizer, [0])
    large = [p for p in model.parameters() if p.numel() >= 4096]
    table = 256 * 4
    expected = sum(2 * (p.numel() + p.numel() // 256 * 4 + table) for p in large)
    content = optimizer.state_dict()["state"].values()
    stored = [m for moments in content for m in moments.values() if isinstance(m, dict)]
    assert sum(t.nbytes for moment in stored for t in moment.values()) == expected
    assert len(large) == 9  # all but the position embedding and the norms


@needs_torchao
@pytest.mark.parametrize("bits", [8, 32])
def test_continued_run_repeats_the_uninterrupted_losses(bits):
    model, optimizer = begin(bits)
    train(model, optimizer, range(5))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    uninterrupted = train(model, optimizer, range(5, 10))
    model, optimizer = begin(bits)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, range(5, 10)) == uninterrupted


@needs_torchao
def test_checkpoint_holds_plain_tensors_alone():
    model, optimizer = begin(8)
    train(model, optimizer, [0])

    def leaves(value):
        if isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                yield from leaves(item)
        else:
            yield type(value)

    assert set(leaves(optimizer.state_dict())) == {torch.Tensor, int, float, bool}


@needs_torchao
@pytest.mark.parametrize(("before", "after"), [(8, 32), (32, 8)])
def test_run_can_be_continued_with_moments_of_the_other_kind(before, after):
    model, optimizer = begin(before)
    train(model, optimizer, range(5))
    saved = through_a_file(optimizer.state_dict())
    again = build_optimizer(model, LEARN, after)
    again.load_state_dict(saved)
    for group in again.param_groups:
        assert group.keys() >= again.defaults.keys()
        assert after == 8 or group["fused"]
    for parameter, moments in again.state.items():
        for name, moment in moments.items():
            expected = dense(optimizer.state[parameter][name])
            # A step of the 8-bit scale is at most 1/64 of the block's largest value.
            tolerance = 0 if after == 32 else expected.abs().max().item() / 64
            torch.testing.assert_close(dense(moment), expected, rtol=0, atol=tolerance)
            assert getattr(moment, "signed", name == "exp_avg") == (name == "exp_avg")
    moments = again.state[model.lm_head.weight]
    assert hasattr(moments["exp_avg"], "codes") == (after == 8)
    assert train(model, again, range(5, 10))[-1] < 4.0


def test_without_torchao_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(InputError, match="pip install 'torchao"):
        build_optimizer(torch.nn.Linear(2, 2), LEARN, bits=8)


@needs_torchao
def test_8bit_step_runs_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed.cache_clear()  # as in a process that begins with it
    subclass_8bit.get_qmap_unsigned.cache_clear()
    with FakeTensorMode():
        model, optimizer = begin(8)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    moment = optimizer.state[model.lm_head.weight]["exp_avg"]
    assert isinstance(moment.codes, FakeTensor)


def begin(bits):
    torch.manual_seed(0)
    model = GPT(SHAPE)
    return model, build_optimizer(model, LEARN, bits)


def train(model, optimizer, steps):
    """The losses of steps on sequences that count upwards."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        start, stride = torch.randint(1, 5, (2, 16, 1), generator=generator)
        tokens = (start + stride * torch.arange(17)) % 64
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3  # a number, as train_step gives it
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def dense(moment):
    return moment.dequantize() if hasattr(moment, "codes") else moment


def through_a_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
