"""The model against Hugging Face's GPT-2, the published modern one, and its own promises."""

import json
import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from model import GPT, KVCache, _NormedAndTurned, _turns
from nanofit.settings.shape import GPTConfig
from tests import published

SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=101, bias=True)
MODERN = replace(SHAPE, arch="modern")
ARCHITECTURES = pytest.mark.parametrize("shape", [SHAPE, MODERN], ids=["gpt2", "modern"])


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_hugging_face_folder_gives_its_logits(tmp_path, activation):
    reference = hugging_face_model(activation)
    reference.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    model = GPT.from_checkpoint(tmp_path).eval()
    idx = torch.randint(0, 101, (3, 24))
    torch.testing.assert_close(model(idx), reference(idx).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt_checkpoint_gives_the_logits_of_its_weights(tmp_path, prefix):
    reference = hugging_face_model("gelu")  # nanoGPT's GELU is the exact one
    weights = {}
    for name, tensor in reference.state_dict().items():
        if name.endswith("weight") and (".c_" in name):
            tensor = tensor.t()  # nanoGPT keeps Linear layers, Hugging Face Conv1D
        weights[prefix + name] = tensor
    # Where nanoGPT finds no flash attention it stores its masks.
    weights[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    model_args = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24}
    model_args |= {"bias": True, "vocab_size": 101, "dropout": 0.1}
    torch.save({"model": weights, "model_args": model_args, "iter_num": 7}, tmp_path / "ckpt.pt")
    model = GPT.from_checkpoint(tmp_path / "ckpt.pt").eval()
    idx = torch.randint(0, 101, (3, 24))
    torch.testing.assert_close(model(idx), reference(idx).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "gradient_tolerance"),
    [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 2e-3, 1e-2), (torch.float16, 5e-4, 2e-3)],
)
def test_chunked_loss_and_gradients_equal_the_full_ones(dtype, loss_tolerance, gradient_tolerance):
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=600, vocab_size=512)
    idx = torch.randint(0, 512, (4, 600))  # 2400 rows: many chunks, the last one short
    targets = torch.randint(0, 512, (4, 600))
    targets[0, :50], targets[3, -70:] = -1, -100
    scale = 65536.0 if dtype == torch.float16 else 1.0  # what GradScaler starts with

    losses, gradients = {}, {}
    for kind in ("full", "chunked"):
        torch.manual_seed(5)
        model = GPT(shape, loss=kind)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            losses[kind] = model(idx, targets)
        (losses[kind] * scale).backward()
        gradients[kind] = {n: p.grad / scale for n, p in model.named_parameters()}

    assert abs(losses["full"] - losses["chunked"]) < loss_tolerance
    for name, expected in gradients["full"].items():
        difference = (gradients["chunked"][name] - expected).norm() / expected.norm()
        assert difference < gradient_tolerance, name


@ARCHITECTURES
def test_ignored_labels_do_not_count(shape):
    model = shaken(GPT(shape))
    idx, targets = torch.randint(0, 101, (2, 24)), torch.randint(0, 101, (2, 24))
    of_first = model(idx[:1], targets[:1])
    for ignored in (-1, -100):
        masked = targets.clone()
        masked[1] = ignored
        torch.testing.assert_close(model(idx, masked), of_first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("loss", "rows"), [("chunked", 128), ("full", 3 * 1024)])
def test_largest_allocation_of_a_step_is_one_chunk_of_logits(loss, rows, dtype):
    shape = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=1024, vocab_size=30000)
    model = GPT(shape, loss=loss)
    idx = torch.randint(0, 30000, (3, 1024))

    def step():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(idx, idx).backward()

    # On some CPUs oneDNN adds up bfloat16 products in a float32 buffer of its own, aligned.
    assert 0 <= max(allocations(step)) - rows * 30000 * 4 <= 128


@ARCHITECTURES
def test_logits_do_not_depend_on_later_tokens(shape):
    model = shaken(GPT(shape)).eval()
    idx = torch.randint(0, 101, (1, 24))
    changed = idx.clone()
    changed[0, 15:] = (changed[0, 15:] + 1) % 101
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[0, :15], after[0, :15])
    assert not torch.allclose(before[0, 15], after[0, 15])


def test_initial_weights_have_gpt2s_spread():
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256, block_size=64, vocab_size=1000))
    block = model.transformer.h[3]
    for parameter, std in (
        (model.transformer.wte.weight, 0.02),
        (model.transformer.wpe.weight, 0.02),
        (block.attn.c_attn.weight, 0.02),
        (block.mlp.c_fc.weight, 0.02),
        (block.attn.c_proj.weight, 0.02 / 4),  # sqrt(2 * 8 layers) = 4
        (block.mlp.c_proj.weight, 0.02 / 4),
    ):
        assert parameter.std().item() == pytest.approx(std, rel=0.05)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_dropout_acts_in_training_alone():
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=24, vocab_size=101, dropout=0.5)
    model, idx = GPT(shape), torch.randint(0, 101, (2, 24))
    assert model.train()(idx, idx) != model(idx, idx)
    assert model.eval()(idx, idx) == model(idx, idx)


@pytest.mark.parametrize("recompute", ["selective", "alternate", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@ARCHITECTURES
def test_recomputed_gradients_equal_the_kept_ones(shape, dropout, dtype, recompute):
    model = shaken(GPT(replace(shape, n_layer=4, dropout=dropout)))
    idx = torch.randint(0, 101, (3, 24))
    kept = loss_and_gradients(model, idx, dtype)
    model.recompute = recompute
    for again, expected in zip(loss_and_gradients(model, idx, dtype), kept, strict=True):
        assert torch.equal(again, expected)


@pytest.mark.parametrize("recompute", ["selective", "alternate", "block"])
@ARCHITECTURES
def test_recomputed_gradients_stay_when_compiled(shape, recompute):
    model, idx = shaken(GPT(shape), std=0.1), torch.randint(0, 101, (3, 24))
    kept = loss_and_gradients(model, idx, torch.bfloat16)
    model.recompute = recompute
    torch._dynamo.reset()
    model.compile(dynamic=False, backend="aot_eager_decomp_partition")  # all but code generation
    compiled = loss_and_gradients(model, idx, torch.bfloat16)
    for again, expected in zip(compiled, kept, strict=True):
        torch.testing.assert_close(again, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("recompute", "floats_per_channel", "others"),
    [
        # two norms' inputs and outputs, qkv, attention, GELU's input and output; attention's sums
        # for each head, two norms' means and deviations
        ("off", 2 + 2 + 3 + 1 + 4 + 4, 4 + 4),
        ("selective", 1 + 3 + 1 + 1 + 4 + 1, 4),  # the input and the five products
        ("alternate", (16 + 1) / 2, (4 + 4) / 2),
        ("block", 1, 0),
    ],
)
@pytest.mark.usefixtures("_no_garbage")
def test_each_layer_keeps_what_a_hand_count_says(recompute, floats_per_channel, others):
    width, tokens = 128, 4 * 64

    def peak(layers):
        shape = GPTConfig(n_layer=layers, n_head=4, n_embd=width, block_size=64, vocab_size=64)
        model, idx = GPT(shape, recompute=recompute), torch.randint(0, 64, (4, 64))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return peak_bytes(lambda: model(idx, idx).backward())

    per_layer = (peak(12) - peak(8)) / 4
    assert per_layer == 4 * tokens * (floats_per_channel * width + others)


def test_blocks_run_again_in_training_alone():
    model, idx = GPT(replace(SHAPE, n_layer=4)), torch.randint(0, 101, (2, 24))
    runs = [0] * 4

    def count(layer):
        runs[layer] += 1

    for layer, block in enumerate(model.transformer.h):
        block.register_forward_pre_hook(lambda *_, layer=layer: count(layer))

    def runs_with(recompute):
        runs[:] = [0] * 4
        model.recompute = recompute
        model(idx, idx).backward()
        return list(runs)

    assert runs_with("off") == [1, 1, 1, 1]
    assert runs_with("alternate") == [2, 1, 2, 1]
    assert runs_with("block") == runs_with("selective") == [2, 2, 2, 2]
    model.eval()
    assert runs_with("block") == [1, 1, 1, 1]
    runs[:] = [0] * 4
    model.train().next_logits(idx, KVCache(model)).sum().backward()  # or it would be filled twice
    assert runs == [1, 1, 1, 1]


@ARCHITECTURES
def test_losses_of_tokens_are_those_of_the_logits_at_their_places(shape):
    model = shaken(GPT(shape)).double().eval()
    idx, targets = torch.randint(0, 101, (2, 3, 24))
    targets[1, 5:9] = -1
    log_probs = model(idx).double().log_softmax(-1)
    expected = -log_probs.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    expected[targets < 0] = 0
    losses = model.token_losses(idx, targets)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)


@ARCHITECTURES
@pytest.mark.parametrize("pieces", [[24], [1, 23], [7, 1, 1, 9, 6], [20, 4]])
def test_cache_filled_in_pieces_gives_the_logits_of_the_whole(shape, pieces):
    model, idx = shaken(GPT(shape)).eval(), torch.randint(0, 101, (2, 24))
    cache, whole = KVCache(model), model(idx)
    for piece in idx.split(pieces, dim=1):
        logits = model.next_logits(piece, cache)
        torch.testing.assert_close(logits, whole[:, cache.length - 1], rtol=0, atol=1e-5)


@ARCHITECTURES
def test_cropped_model_gives_the_same_logits_for_short_sequences(shape):
    model, idx = shaken(GPT(shape)).eval(), torch.randint(0, 101, (2, 10))
    before = model(idx)
    model.crop_block_size(10)
    assert model.config.block_size == 10
    assert torch.equal(model(idx), before)


def test_weights_of_another_architecture_are_refused(tmp_path):
    from nanofit.terminal import InputError

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="llama"):
        GPT.from_checkpoint(tmp_path)
    with pytest.raises(InputError, match="no weights at"):
        GPT.from_checkpoint(tmp_path / "missing.pt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="does not hold a GPT-2"):
        GPT.from_checkpoint(tmp_path)
    torch.save({"model": {}, "model_args": {"rope": True}}, tmp_path / "fork.pt")
    with pytest.raises(InputError, match="does not hold a GPT-2"):
        GPT.from_checkpoint(tmp_path / "fork.pt")
    (tmp_path / "ckpt.pt").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="not a readable checkpoint"):
        GPT.from_checkpoint(tmp_path / "ckpt.pt")


def test_parameters_and_flops_match_hand_counts():
    model = GPT(SHAPE)
    block = 12 * 32**2 + 13 * 32  # matrices; biases 3C + C + 4C + C and two norms of 2C
    total = 101 * 32 + 24 * 32 + 2 * block + 2 * 32
    assert model.num_params() == total
    assert model.num_params(positions=False) == total - 24 * 32
    assert model.config.flops_per_token == 6 * (total - 24 * 32) + 12 * 2 * 32 * 24


# modern


@pytest.mark.parametrize("n_head", [1, 2, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_modern_logits_loss_and_gradients_are_the_published_models(bias, n_head):
    """Heads of 32, 16 and 4 dimensions, the fewest of which half can turn."""
    shape = replace(MODERN, n_head=n_head, bias=bias)
    model = shaken(GPT(shape))
    idx, targets = torch.randint(0, 101, (2, 2, 24)).unbind()
    reference = in_float64(model)
    expected = published.loss(reference, idx, targets, n_head)
    expected.backward()
    model(idx, targets).backward()
    exact = published.logits(reference, idx, n_head)
    assert exact.abs().max() > 5  # of 15: the cap is felt
    torch.testing.assert_close(model(idx).double(), exact, atol=2e-5, rtol=0)
    assert model(idx, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, reference[name].grad) < 2e-5, name


def test_modern_attention_scale_is_the_published_one_at_128():
    shape = replace(MODERN, n_head=1, n_embd=128)
    assert GPT(shape).transformer.h[0].attn.scale == 0.12
    assert GPT(replace(shape, n_head=4)).transformer.h[0].attn.scale == pytest.approx(0.24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modern_half_precision_stays_near_the_published_model(dtype):
    model = shaken(GPT(MODERN), std=0.1)
    idx, targets = torch.randint(0, 101, (2, 2, 24)).unbind()
    reference = in_float64(model)
    published.loss(reference, idx, targets, 4).backward()
    with torch.autocast("cpu", dtype):
        loss = model(idx, targets)
    (loss * 1024).backward()
    assert loss.dtype == torch.float32
    for name, parameter in model.named_parameters():
        tolerance = 0.03 if dtype == torch.bfloat16 else 0.004
        assert relative(parameter.grad / 1024, reference[name].grad) < tolerance, name


def test_norm_and_turn_have_the_gradient_of_their_formula():
    turns = _turns(MODERN).double()
    x = torch.randn(2, 24, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_NormedAndTurned.apply, (x, turns), atol=1e-8)
    by_hand = published.rotated(published.rms_norm(x.transpose(1, 2))).transpose(1, 2)
    torch.testing.assert_close(_NormedAndTurned.apply(x, turns), by_hand, atol=1e-6, rtol=0)


def test_norm_and_turn_of_zeros_are_zeros():
    x = torch.zeros(1, 24, 4, 8, requires_grad=True)
    y = _NormedAndTurned.apply(x, _turns(MODERN))
    y.sum().backward()
    assert not y.any() and x.grad.isfinite().all()


def test_modern_starts_as_published():
    shape = GPTConfig(
        n_layer=2, n_head=2, n_embd=256, block_size=8, vocab_size=1000, bias=True, arch="modern"
    )
    model = GPT(shape)
    spread = (0.33 / 256) ** 0.5  # a variance of 0.33 / fan-in
    for name, parameter in model.named_parameters():
        if name.endswith(("c_attn.weight", "c_fc.weight")):
            expected = (0.0, spread)
        elif name.endswith("wte.weight"):
            expected = (0.0, 1.0)
        elif ".ln_" in name:
            expected = (1.0, 0.0)
        else:  # biases, output projections and the head
            expected = (0.0, 0.0)
        found = (parameter.mean().item(), parameter.std().item())
        assert found == pytest.approx(expected, rel=0.01, abs=0.005 * expected[1]), name
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert {n for n, p in model.named_parameters() if p.dim() == 1 and "ln" not in n} == {
        name.replace("weight", "bias")
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and "wte" not in name
    }
    idx = torch.randint(0, 1000, (2, 8))
    assert model(idx, idx).item() == pytest.approx(math.log(1000))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_parameter_sizes_are_those_of_the_model(arch, bias):
    shape = replace(SHAPE, arch=arch, bias=bias)
    model = GPT(shape)
    sizes = map(math.prod, shape.weights().values())
    assert sorted(sizes) == sorted(p.numel() for p in model.parameters())
    assert model.num_params() == shape.parameters
    table = model.transformer.wte.weight.numel()
    other = table if arch == "modern" else model.transformer.wpe.weight.numel()
    assert shape.embedding_parameters == table + other


def test_flops_of_a_modern_token_leave_out_the_lookup():
    model = GPT(MODERN)
    multiplied = model.num_params() - 101 * 32
    assert MODERN.flops_per_token == 6 * multiplied + 12 * 2 * 32 * 24


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_compiled_modern_model_equals_the_eager_one(backend):
    model, idx = shaken(GPT(MODERN)), torch.randint(0, 101, (3, 24))
    eager = loss_and_gradients(model, idx, torch.float32)
    torch._dynamo.reset()
    model.compile(dynamic=False, backend=backend)
    for compiled, expected in zip(
        loss_and_gradients(model, idx, torch.float32), eager, strict=True
    ):
        assert relative(compiled, expected) < 1e-5


def test_modern_checkpoint_gives_its_logits_again(tmp_path):
    model, idx = shaken(GPT(MODERN)).eval(), torch.randint(0, 101, (2, 24))
    content = {"model": model.state_dict(), "model_args": vars(MODERN)}
    torch.save(content, tmp_path / "ckpt.pt")
    again = GPT.from_checkpoint(tmp_path / "ckpt.pt").eval()
    assert again.config == MODERN
    assert torch.equal(again(idx), model(idx))


def shaken(model: GPT, std: float = 0.3) -> GPT:
    """With random numbers where a fresh model has zeros and ones, so that each one matters."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(".ln_" in name), std=std)
    return model


def in_float64(model: GPT) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in model.named_parameters()
    }


def relative(tensor: torch.Tensor, truth: torch.Tensor) -> float:
    return ((tensor - truth).norm() / truth.norm()).item()


def hugging_face_model(activation: str):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=32,
        n_positions=24,
        vocab_size=101,
        activation_function=activation,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():  # norms and biases too, so that each one matters
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def loss_and_gradients(model, idx, dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(idx, idx)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def peak_bytes(call) -> int:
    """The most that a call had allocated at one time, on top of what there was."""
    return max(accumulate(allocations(call)))


def allocations(call) -> list[int]:
    """Bytes of each allocation made by a call, wherever in torch it is made, and of each free."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]
