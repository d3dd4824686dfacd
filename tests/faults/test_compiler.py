"""A compiler that is removed while the model is being compiled."""

import os
import shutil
import sys

import pytest

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_events, read_metrics

SHORT_LIVED = """#!/bin/sh
case "$*" in *.main.cpp*) echo >> {calls};; esac
[ "$(cat {calls} | wc -l)" -gt {allowed} ] && exit 127
exec {real} "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler, to take it away")
@pytest.mark.parametrize("allowed", [2, 12], ids=["forward", "backward"])
def test_a_compiler_that_goes_half_way_leaves_an_eager_run_with_its_curve(
    tiny_dataset, tiny_run, tmp_path, allowed
):
    """Of the twenty pieces that one layer is compiled in, backward passes are the last."""
    compiler, calls, out = tmp_path / "compiler", tmp_path / "calls", tmp_path / "out"
    calls.touch()
    compiler.write_text(SHORT_LIVED.format(calls=calls, allowed=allowed, real=shutil.which("g++")))
    compiler.chmod(0o755)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    flags = ["--n_layer=1", "--max_iters=8"]
    places = [f"--dataset={tiny_dataset}", f"--out_dir={out}"]
    compiled = ["--compile=True", "--compile_after=3"]
    done = processes.run(
        [sys.executable, PROJECT / "train.py", *TINY_MODEL, *places, *flags, *compiled],
        env={**os.environ, "CXX": str(compiler), **cache},
        timeout_s=900,
    )
    assert done.returncode == 0, done.stderr
    assert len(calls.read_text()) > allowed, "it was compiled without that"
    assert read_events(out, "stage")[-1]["now"] == "eager for good"
    assert tiny_run(*flags, out_dir=tmp_path / "whole").returncode == 0
    for kind, value in (("step", "loss"), ("step", "grad_norm"), ("eval", "val_loss")):
        assert read_metrics(out, kind, value) == read_metrics(tmp_path / "whole", kind, value)
