"""Muon against singular vectors and against the published step, both in float64.

Twelve Newton-Schulz steps double small singular values twelve times: what is below some 1/2000 of
the matrix's norm does not get to 1. So matrices whose singular values are known are used here.
"""

import copy
import io
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.learning import muon
from nanofit.learning.muon import Muon, orthogonalized
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.run.spikes import SkipWatch
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from tests import processes, published
from tests.conftest import PROJECT

SHAPE = GPTConfig(
    n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=40, bias=True, arch="modern"
)
_, LEARN, _ = load_config(["--optimizer=muon", "--batch_size=3", "--gradient_accumulation_steps=1"])
TOKENS_PER_STEP = 3 * 8
# Wide enough for torchao, which leaves tensors of less than 4096 numbers as they are.
WIDE = replace(SHAPE, n_embd=128, n_head=2, n_layer=1)


# one matrix


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12), (64, 16)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-6),
        (torch.float32, 1e-5),
        (torch.float16, 0.004),  # which has three more bits than bfloat16
        (torch.bfloat16, 0.03),
    ],
    ids=str,
)
def test_update_is_the_product_of_singular_vectors_as_long_as_published(shape, dtype, tolerance):
    """To the tolerance in the Frobenius norm, relative to that of the update."""
    gradient = matrix_of(*shape, values=torch.linspace(0.2, 1.0, min(shape)))
    weight = stepped(torch.zeros(shape).double(), [gradient], dtype=dtype, lr=0.5)
    rows, columns = shape
    u, _, vt = torch.linalg.svd(gradient, full_matrices=False)
    assert relative(-weight / 0.5, math.sqrt(max(1, rows / columns)) * u @ vt) < tolerance


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_five_steps_leave_singular_values_in_their_band(shape):
    gradient = torch.randn(shape, dtype=torch.float64)
    weight = stepped(torch.zeros_like(gradient), [gradient], steps=5, lr=1.0)
    u, _, vt = torch.linalg.svd(gradient, full_matrices=False)
    scale = math.sqrt(max(1, shape[0] / shape[1]))
    in_its_axes = u.T @ (-weight / scale) @ vt.T
    values = in_its_axes.diagonal()
    assert values.min() > 0.65
    assert values.max() < 1.25
    assert (values - 1).abs().max() > 0.05  # they are not the twelve gentle ones
    torch.testing.assert_close(in_its_axes, values.diag(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (64, 16)])
def test_five_steps_are_those_of_torchs_muon(shape):
    """Which divides by the norm after rounding to bfloat16, not before: equal to 1 % of the way."""
    start = torch.randn(shape)
    gradients = [torch.randn(shape) for _ in range(4)]
    theirs = torch.nn.Parameter(start.clone())
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.3, momentum=0.95, ns_steps=5)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        torchs.step()
    options = dict(lr=0.1, weight_decay=0.3, steps=5, dtype=torch.bfloat16)
    ours = stepped(start, gradients, **options)
    assert relative(ours - start, (theirs.detach() - start).double()) < 0.01
    plain = stepped(start, gradients, **{**options, "weight_decay": 0.0})
    assert relative(plain - start, (theirs.detach() - start).double()) > 0.03
    gentle = stepped(start, gradients, **{**options, "steps": 12})
    assert relative(gentle - start, (theirs.detach() - start).double()) > 0.03


def test_twelve_steps_do_to_singular_values_what_the_polynomial_does():
    values = torch.logspace(-7, 0, 24).double()
    gradient = matrix_of(24, 40, values=values)
    weight = stepped(torch.zeros_like(gradient), [gradient], lr=1.0)
    torch.testing.assert_close(-weight, published.muon_direction(gradient), rtol=0, atol=1e-9)
    assert torch.linalg.svdvals(weight).min() < 0.01  # too small to be brought to 1


def test_size_of_a_gradient_does_not_matter_and_zeros_move_nothing():
    gradient = torch.randn(12, 20)
    tiny, huge = (stepped(torch.zeros(12, 20), [g * gradient]) for g in (1e-12, 1e12))
    torch.testing.assert_close(tiny, huge, rtol=0, atol=1e-6)
    weight = torch.randn(12, 20)
    assert torch.equal(stepped(weight, [torch.zeros(12, 20)]), weight)


def test_queries_keys_and_values_are_three_matrices():
    gradient = torch.cat([scale * torch.randn(16, 16) for scale in (1e-3, 1.0, 1e3)]).double()
    together = stepped(torch.zeros_like(gradient), [gradient], parts=3)
    apart = [stepped(torch.zeros_like(part), [part]) for part in gradient.chunk(3)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=0, atol=1e-12)


def test_momentum_is_a_running_mean_seen_one_step_ahead():
    """m ← 0.95 m + 0.05 g, and the direction of 0.05 g + 0.95 m."""
    gradients = [torch.randn(12, 20).double() for _ in range(4)]
    weight = stepped(torch.zeros(12, 20).double(), gradients, lr=0.1)
    expected = torch.zeros(12, 20).double()
    for count in range(1, 5):
        seen = gradients[:count]
        mean = sum(0.05 * 0.95 ** (count - 1 - n) * g for n, g in enumerate(seen))
        expected -= 0.1 * published.muon_direction(0.05 * seen[-1] + 0.95 * mean)
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)


def test_weight_decay_is_decoupled_and_times_the_rate():
    weight, gradient = torch.randn(12, 20).double(), torch.randn(12, 20).double()
    plain = stepped(weight, [gradient], lr=0.1)
    decayed = stepped(weight, [gradient], lr=0.1, weight_decay=0.3)
    torch.testing.assert_close(plain - decayed, 0.1 * 0.3 * weight, rtol=0, atol=1e-12)
    still = stepped(weight, [torch.zeros_like(weight)] * 2, lr=0.1, weight_decay=0.3)
    torch.testing.assert_close(still, weight * (1 - 0.03) ** 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("most_numbers", [1, 12 * 20 * 2, 2**25])
def test_batch_gives_what_one_at_a_time_gives(monkeypatch, most_numbers):
    """Wide and tall matrices of one shape are one batch."""
    shapes = [(12, 20), (20, 12), (12, 20), (36, 12), (12, 20), (8, 8)]
    gradients = [torch.randn(shape).double() for shape in shapes]
    weights = [torch.nn.Parameter(torch.randn(shape).double()) for shape in shapes]
    alone = [stepped(w, [g], lr=0.1) for w, g in zip(weights, gradients, strict=True)]
    lengths = []

    def counted(matrices, steps):
        lengths.append(len(matrices))
        return orthogonalized(matrices, steps)

    monkeypatch.setattr(muon, "orthogonalized", counted)
    monkeypatch.setattr(muon, "MOST_NUMBERS", most_numbers)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer(weights, lr=0.1).step()
    expected = {1: [1, 1, 1, 1, 1, 1], 12 * 20 * 2: [2, 2, 1, 1], 2**25: [4, 1, 1]}
    assert lengths == expected[most_numbers]
    for together, one in zip(weights, alone, strict=True):
        torch.testing.assert_close(together.detach(), one, rtol=0, atol=1e-12)


# a whole model


def test_each_parameter_is_in_the_group_that_was_published_for_it():
    model = GPT(SHAPE)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {}
    for group in build_optimizer(model, LEARN).param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in rates
            rates[names[id(parameter)]] = round(0.025 * group.get("rate", 1.0), 12)
    assert rates.keys() == set(names.values())
    for name, rate in rates.items():
        if name == "transformer.wte.weight":
            assert rate == published.RATES["embedding"]
        elif name == "lm_head.weight":
            assert rate == published.RATES["head"]
        elif model.get_parameter(name).dim() == 1:
            assert rate == published.RATES["vectors"]
        else:
            assert name.startswith("transformer.h.")
            assert rate == published.MUON["lr"]


def test_adamw_half_is_torchs_adamw_with_the_published_rates():
    """For a mean loss: eps is 1e-10 / tokens of a step, and matters where gradients are small."""
    model, expected = GPT(SHAPE), GPT(SHAPE)
    expected.load_state_dict(model.state_dict())
    ours = build_optimizer(model, LEARN)
    others = {n: p for n, p in expected.named_parameters() if ".h." not in n or p.dim() == 1}
    rates = {"transformer.wte.weight": 0.7, "lm_head.weight": 0.004}
    groups = [{"params": [p], "lr": rates.get(n, 0.015)} for n, p in others.items()]
    eps = 1e-10 / TOKENS_PER_STEP
    torchs = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=eps, weight_decay=0.001)
    for _ in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = 1e-11 * torch.randn_like(parameter)
            expected.get_parameter(name).grad = parameter.grad.clone()
        set_rates(ours, 0.025)
        ours.step()
        torchs.step()
    for name in others:
        torch.testing.assert_close(model.get_parameter(name), expected.get_parameter(name))


def test_two_steps_with_given_gradients_are_the_published_ones():
    model = shaken(GPT(SHAPE)).double()
    ours = build_optimizer(model, LEARN, products=torch.float64)
    theirs = published.Step(weights_of(model), TOKENS_PER_STEP)
    for share in (1.0, 0.4):
        gradients = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        set_rates(ours, 0.025 * share)
        ours.step()
        theirs.take(gradients, share)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), theirs.weights[name], rtol=0, atol=1e-9, msg=name
        )


def test_two_full_steps_of_the_model_are_the_published_ones():
    """In float32 against float64: to 1e-3 of how far each parameter has moved."""
    model = shaken(GPT(SHAPE))
    start = weights_of(model)
    theirs = published.Step(weights_of(model), TOKENS_PER_STEP)
    optimizer, device = build_optimizer(model, LEARN), describe_device("cpu")
    for share in (1.0, 0.4):
        idx, targets = torch.randint(0, 40, (2, 3, 8))
        cut = [MicroBatch(idx[a:b], targets[a:b], (b - a) / 3) for a, b in ((0, 1), (1, 3))]
        learn = {"lr": 0.025 * share, "grad_clip": 0.0, "seed": 0}
        scaler = device.grad_scaler()
        train_step(model, optimizer, scaler, cut, device=device, ranks=Ranks(), **learn)
        leaves = {n: w.clone().requires_grad_() for n, w in theirs.weights.items()}
        published.loss(leaves, idx, targets, SHAPE.n_head).backward()
        theirs.take({n: leaf.grad for n, leaf in leaves.items()}, share)
    for name, weight in weights_of(model).items():
        expected = theirs.weights[name]
        assert (expected - start[name]).norm() > 0
        assert relative(weight - start[name], expected - start[name]) < 1e-3, name


def test_learning_rate_scales_all_rates_together():
    moved = []
    for factor in (1.0, 0.5):
        torch.manual_seed(2)
        model = shaken(GPT(SHAPE)).double()
        before = weights_of(model)
        learn = replace(LEARN, learning_rate=0.025 * factor)
        ours = build_optimizer(model, learn, products=torch.float64)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        set_rates(ours, learn.learning_rate)
        ours.step()
        moved.append({n: w - before[n] for n, w in weights_of(model).items()})
    for name, whole in moved[0].items():
        torch.testing.assert_close(moved[1][name], whole / 2, rtol=1e-9, atol=1e-12)


# both halves are one optimiser


@pytest.mark.parametrize("bits", [32, 8])
def test_state_goes_through_a_file_and_the_next_steps_are_the_same(bits, _uncompiled):
    model = shaken(GPT(WIDE))
    ours = build_optimizer(model, LEARN, bits)
    learn_from_noise(model, ours, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": ours.state_dict()}, file)
    learn_from_noise(model, ours, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = GPT(WIDE)
    again.load_state_dict(saved["model"])
    restored = build_optimizer(again, LEARN, bits)
    restored.load_state_dict(saved["optimizer"])
    assert len(saved["optimizer"]["state"]) == len(list(model.parameters()))
    learn_from_noise(again, restored, range(3, 6))
    assert_equal(again, weights_of(model))


@pytest.mark.parametrize(("before", "after"), [(8, 32), (32, 8)])
def test_moments_of_the_other_kind_are_taken_and_momentum_stays(before, after, _uncompiled):
    model = shaken(GPT(WIDE))
    ours = build_optimizer(model, LEARN, before)
    learn_from_noise(model, ours, range(3))
    restored = build_optimizer(model, LEARN, after)
    restored.load_state_dict(ours.state_dict())
    for name, parameter in model.named_parameters():
        then, now = ours.state[parameter], restored.state[parameter]
        assert then.keys() == now.keys()
        if "momentum" in then:
            assert is_matrix_of_a_block(name, parameter)
            assert torch.equal(then["momentum"], now["momentum"])
    embedding = restored.state[model.transformer.wte.weight]
    assert hasattr(embedding["exp_avg"], "codes") == (after == 8)


def test_8bit_moments_of_the_adamw_half_learn_as_the_32bit_ones_do(_uncompiled):
    """Of a model that counts upwards; Muon's half is the same in both."""
    losses = []
    for bits in (32, 8):
        torch.manual_seed(5)
        model = GPT(WIDE)
        ours = build_optimizer(model, LEARN, bits)
        losses.append([])
        for step in range(30):
            start, stride = torch.randint(
                1, 4, (2, 8, 1), generator=torch.Generator().manual_seed(step)
            )
            tokens = (start + stride * torch.arange(9)) % 40
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
            set_rates(ours, 0.025)
            ours.step()
            ours.zero_grad(set_to_none=True)
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[1][-1] < 0.5 * losses[1][0]


@pytest.mark.parametrize("bad_half", ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"])
@pytest.mark.parametrize("bits", [32, 8])
def test_overflow_in_either_half_skips_both(bad_half, bits, _uncompiled):
    """Through GradScaler: by a switch on the device, or in 8 bits by leaving the step out."""
    model = shaken(GPT(WIDE))
    ours, scaler = build_optimizer(model, LEARN, bits), torch.amp.GradScaler("cpu", 2.0**10)
    assert getattr(ours, "_step_supports_amp_scaling", False) == (bits == 32)
    for step, is_bad in enumerate((False, True, False)):
        before, state = weights_of(model), copy.deepcopy(ours.state_dict()["state"])
        put_noise(model, step, scale=scaler.scale(torch.ones(())).item())
        if is_bad:
            model.get_parameter(bad_half).grad[0, 0] = math.inf
        scaler.unscale_(ours)
        set_rates(ours, 0.025)
        scaler.step(ours)
        scaler.update()
        if is_bad:
            assert_equal(model, before)
            assert are_equal(ours.state_dict()["state"], state)
        else:
            assert not are_equal(weights_of(model), before)
            for name, weight in weights_of(model).items():
                assert weight.isfinite().all()
                assert not torch.equal(weight, before[name])
    assert scaler.get_scale() == 2.0**9


def test_a_spike_is_skipped_in_both_halves():
    """Against a run that never saw it, and against one without a watch."""
    finals = {}
    for name, steps in (("seen", [0, 1, "spike", 2]), ("spared", [0, 1, 2]), ("plain", [0, 1, 2])):
        torch.manual_seed(6)
        model = shaken(GPT(SHAPE))
        ours = build_optimizer(model, LEARN)
        if name != "plain":
            SkipWatch(ours)
        for step in steps:
            put_noise(model, 9 if step == "spike" else step, scale=1e3 if step == "spike" else 1.0)
            ours.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            set_rates(ours, 0.025)
            ours.step()
        finals[name] = weights_of(model)
    assert are_equal(finals["seen"], finals["spared"])
    assert are_equal(finals["plain"], finals["spared"])


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("updates_before", [0, 2])
@pytest.mark.parametrize("bits", [32, 8])
def test_interrupted_update_is_undone_in_both_halves(bits, updates_before, _uncompiled):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**46, limits[1]))
    try:
        memory = describe_device("cpu").memory()
        memory.forget_peak()
        torch.ones(2**26)  # leaves room for copies
        model = shaken(GPT(WIDE))
        ours = build_optimizer(model, LEARN, bits)
        undo = UpdateUndo(ours, memory)
        learn_from_noise(model, ours, range(updates_before))
        undo.forget()
        before, state = weights_of(model), copy.deepcopy(ours.state_dict())
        learn_from_noise(model, ours, [updates_before])
        changed = weights_of(model)
        assert all(not torch.equal(changed[name], weight) for name, weight in before.items())
        assert undo.undo()
        assert_equal(model, before)
        for part in ("state", "param_groups"):
            now, then = ours.state_dict()[part], state[part]
            if part == "param_groups":
                now, then = without_rates(now), without_rates(then)
            assert are_equal(now, then)
        learn_from_noise(model, ours, [updates_before])  # the same once more
        assert_equal(model, changed)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


TWO_PROCESSES = """
import sys, torch
from nanofit.learning import muon
from nanofit.learning.optim import build_optimizer
from nanofit.machine.dist import start_ranks
from nanofit.terminal import run_script
from model import GPT
from tests.learning.test_muon import LEARN, SHAPE, learn_from_noise, shaken
orthogonalized, mine = muon.orthogonalized, []
def counted(matrices, steps):
    mine.append(len(matrices))
    return orthogonalized(matrices, steps)
muon.orthogonalized = counted
def main(argv):
    with start_ranks("gloo") as ranks:
        torch.manual_seed(7)
        model = shaken(GPT(SHAPE))
        optimizer = build_optimizer(model, LEARN, ranks=ranks)
        learn_from_noise(model, optimizer, range(2))
        state = {"matrices": sum(mine), "model": model.state_dict()}
        torch.save(state, argv[0] + str(ranks.rank))
run_script(main)
"""


def test_two_processes_share_the_matrices_and_step_as_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    processes.run(
        [*launcher, script, tmp_path / "rank"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    one, other = (torch.load(tmp_path / f"rank{n}", weights_only=True) for n in range(2))
    matrices = 2 * 6  # q, k, v, their projection, up and down, in two layers
    assert one["matrices"] + other["matrices"] == 2 * matrices  # in two steps, none of them twice
    assert min(one["matrices"], other["matrices"]) >= 0.4 * 2 * matrices
    torch.manual_seed(7)
    model = shaken(GPT(SHAPE))
    learn_from_noise(model, build_optimizer(model, LEARN), range(2))
    for name, weight in model.state_dict().items():
        assert torch.equal(one["model"][name], other["model"][name])
        torch.testing.assert_close(one["model"][name], weight, rtol=0, atol=1e-6)


@pytest.fixture
def _uncompiled():
    """torchao compiles its step, for a minute on a CPU; the arithmetic is the same without."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


def learn_from_noise(model: GPT, optimizer: torch.optim.Optimizer, steps) -> None:
    for step in steps:
        put_noise(model, step)
        set_rates(optimizer, 0.025)
        optimizer.step()


def put_noise(model: GPT, step: int, scale: float = 1.0) -> None:
    """Gradients that are the same whenever a step is repeated."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * scale * torch.randn(parameter.shape, generator=generator)


def is_matrix_of_a_block(name: str, parameter: Tensor) -> bool:
    return ".h." in name and parameter.dim() == 2


def without_rates(groups: list[dict]) -> list[dict]:
    return [{name: value for name, value in group.items() if name != "lr"} for group in groups]


def assert_equal(model: GPT, weights: dict[str, Tensor]) -> None:
    assert are_equal(weights_of(model), weights)


def are_equal(one, other) -> bool:
    """Bit for bit, tensors and all that holds them."""
    some, others = tree_flatten(one)[0], tree_flatten(other)[0]
    return len(some) == len(others) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(some, others, strict=True)
    )


def matrix_of(rows: int, columns: int, *, values: Tensor) -> Tensor:
    """With these singular values, in float64."""
    u = torch.linalg.qr(torch.randn(rows, len(values)).double())[0]
    v = torch.linalg.qr(torch.randn(columns, len(values)).double())[0]
    return (u * values.double()) @ v.T


def optimizer(weights: list, *, lr: float, steps=12, dtype=torch.float64, **group) -> Muon:
    groups = [{"params": weights, **group}]
    return Muon(groups, lr=lr, steps=steps, dtype=dtype, ranks=Ranks())


def stepped(weight: Tensor, gradients: list[Tensor], *, lr: float = 0.1, **options) -> Tensor:
    """A weight after steps along these gradients."""
    parameter = torch.nn.Parameter(weight.detach().clone())
    options.setdefault("dtype", weight.dtype)
    ours = optimizer([parameter], lr=lr, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        ours.step()
    return parameter.detach()


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """As train_step does."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate", 1.0)


def shaken(model: GPT) -> GPT:
    """Without zeros, which would hide what they are multiplied with."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def weights_of(model: GPT) -> dict[str, Tensor]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def relative(tensor: Tensor, truth: Tensor) -> float:
    return ((tensor.double() - truth).norm() / truth.norm()).item()
