"""Compile stages: the compiled step against the eager one, and the way back when it fails."""

import torch

from model import GPT, GPTConfig
from nanofit.compiler import CompileStages
from nanofit.device import describe_device
from nanofit.dist import Ranks
from nanofit.loader import MicroBatch

SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=31)


def test_compiled_stage_gives_the_eager_loss_and_gradients():
    model, batch = GPT(SHAPE), one_batch()
    model(batch.idx, batch.targets).backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    stages, events = make_stages(model, compile_after=5)
    stages.advance(4, lambda: iter([batch]))
    assert stages.stage == "eager"
    stages.advance(5, lambda: iter([batch]))
    assert stages.stage == "compiled"
    assert [name for _, name in events] == ["compile"]
    assert all(p.grad is None for p in model.parameters())  # the trial leaves nothing behind
    assert not any(name.startswith("_orig_mod") for name in model.state_dict())
    model(batch.idx, batch.targets).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], atol=1e-6, rtol=1e-4)


def test_failing_compiler_leaves_an_eager_model_that_still_learns(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nonexistent/compiler",))
    torch._dynamo.reset()
    model, batch = GPT(SHAPE), one_batch()
    expected = model(batch.idx, batch.targets)
    stages, events = make_stages(model, compile_after=0)
    stages.advance(0, lambda: iter([batch]))
    assert stages.stage == "eager for good"
    assert model.training
    loss = model(batch.idx, batch.targets)
    loss.backward()
    assert torch.equal(loss, expected)
    stages.advance(1, lambda: iter([batch]))
    assert len(events) == 1  # it is tried once


def test_compiled_model_that_disagrees_is_not_kept(monkeypatch):
    model, batch = GPT(SHAPE), one_batch()

    def compile_wrongly(**_):
        model._compiled_call_impl = lambda *args: GPT.forward(model, *args) * 1.5

    monkeypatch.setattr(model, "compile", compile_wrongly)
    stages, _ = make_stages(model, compile_after=0)
    expected = model(batch.idx, batch.targets)
    stages.advance(0, lambda: iter([batch]))
    assert stages.stage == "eager for good"
    assert torch.equal(model(batch.idx, batch.targets), expected)


def test_compile_off_never_tries():
    model = GPT(SHAPE)
    stages, events = make_stages(model, compile_after=None)
    stages.advance(10**9, lambda: iter([one_batch()]))
    assert (stages.stage, events) == ("eager", [])


def make_stages(model: GPT, compile_after: int | None):
    events = []

    def event(step, name, **_):
        events.append((step, name))

    return CompileStages(model, compile_after, describe_device("cpu"), Ranks(), event), events


def one_batch() -> MicroBatch:
    idx = torch.randint(0, 31, (2, 8))
    return MicroBatch(idx, idx.roll(-1, 1), 1.0)
