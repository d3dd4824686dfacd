"""A run continued on other data than it was begun with."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.conftest import read_events, read_metrics

AGAIN = "--max_iters=18"


@pytest.fixture
def dataset(tiny_dataset, tmp_path):
    """A copy, to be changed."""
    return shutil.copytree(tiny_dataset, tmp_path / "data")


@pytest.fixture
def run(tiny_run, dataset):
    return lambda *flags: tiny_run(f"--dataset={dataset}", *flags)


def exchange(dataset, split: str) -> None:
    """As many tokens, in another order."""
    path = dataset / f"{split}.bin"
    np.fromfile(path, np.uint16)[::-1].tofile(path)


def shorten(dataset, split: str) -> None:
    path, meta = dataset / f"{split}.bin", json.loads((dataset / "meta.json").read_text())
    tokens = np.fromfile(path, np.uint16)[:-40]
    tokens.tofile(path)
    meta["splits"][split]["bins"][0]["tokens"] = len(tokens)
    (dataset / "meta.json").write_text(json.dumps(meta))


def claim_another_digest(dataset, split: str) -> None:
    """What a sample of the tokens may not see."""
    meta = json.loads((dataset / "meta.json").read_text())
    meta["splits"][split]["bins"][0]["sha256"] = "0" * 64
    (dataset / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (exchange, "as many tokens, but other ones"),
        (shorten, "tokens instead of"),
        (claim_another_digest, "as many tokens, but other ones"),
    ],
)
def test_other_data_are_refused_and_nothing_is_touched(run, dataset, tmp_path, change, told, split):
    meta = json.loads((dataset / "meta.json").read_text())
    meta["splits"][split]["bins"][0]["sha256"] = "f" * 64
    (dataset / "meta.json").write_text(json.dumps(meta))
    assert run().returncode == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    change(dataset, split)
    refused = run(AGAIN)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert f"({split}: " in line and told in line and "--accept_new_data=True" in line
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_other_data_can_be_taken_on_purpose_and_are_then_the_runs(run, dataset, tmp_path):
    assert run().returncode == 0
    on_old = min(read_metrics(tmp_path / "out", "eval", "val_loss").values())
    exchange(dataset, "val")
    accepted = run(AGAIN, "--accept_new_data=True")
    assert accepted.returncode == 0, accepted.stderr
    assert "goes on with other data: val as many tokens, but other ones" in accepted.stdout
    [event] = read_events(tmp_path / "out", "data changed")
    assert (event["step"], event["val"]) == (12, "as many tokens, but other ones")
    # The best loss on other text is no bar to clear.
    best = torch.load(tmp_path / "out/ckpt-best.pt", weights_only=True)
    on_new = read_metrics(tmp_path / "out", "eval", "val_loss")
    assert best["best_val_loss"] == min(on_new[12], on_new[18]) > on_old
    assert run("--max_iters=20").returncode == 0


def test_without_a_description_of_the_data_a_sample_of_them_is_enough(run, dataset):
    (dataset / "meta.json").unlink()
    assert run("--vocab_size=64").returncode == 0
    assert run(AGAIN).returncode == 0
    exchange(dataset, "train")
    assert run("--max_iters=24").returncode == 2


def test_a_checkpoint_from_before_such_marks_goes_on(run, dataset, tmp_path):
    assert run().returncode == 0
    path = tmp_path / "out/ckpt-00000012.pt"
    content = torch.load(path, weights_only=True)
    del content["data"], content["machine"], content["compile_at"]
    torch.save(content, path)
    exchange(dataset, "train")
    assert run(AGAIN).returncode == 0


def test_a_run_goes_on_elsewhere_and_says_so(run, tmp_path):
    assert run().returncode == 0
    path = tmp_path / "out/ckpt-00000012.pt"
    content = torch.load(path, weights_only=True)
    content["machine"] |= {"torch": "2.0.0", "device": "NVIDIA GeForce RTX 4070"}
    torch.save(content, path)
    done = run(AGAIN)
    assert done.returncode == 0, done.stderr
    assert "goes on elsewhere: device CPU, 1 thread, before NVIDIA GeForce RTX 4070" in done.stdout
    [event] = read_events(tmp_path / "out", "machine changed")
    assert event["torch"].endswith("before 2.0.0")
