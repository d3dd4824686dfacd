"""A run whose model is chosen: once, and from then on a run like any other."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanofit.settings.config import load_config
from tests import processes
from tests.conftest import read_events, read_records, write_tiny_dataset

SHORT = "--hours=0.002 --device=cpu --report=False --sample_interval=0".split()
WITHOUT_LENGTH = [word for word in SHORT if "hours" not in word]


@pytest.fixture
def auto_run(tiny_dataset, tmp_path):
    """Run train.py with a chosen model, as a user does; returns the finished process."""

    def run(*flags: str, ranks: int = 1, words: tuple[str, ...] = ("--model=auto", *SHORT)):
        words = [*words, f"--dataset={tiny_dataset}", f"--out_dir={tmp_path / 'out'}"]
        words += ["--vocab_size=64", *flags]
        if ranks == 1:
            return processes.run_script("train.py", *words, cwd=tmp_path)
        return processes.run_ranks(ranks, "train.py", *words, cwd=tmp_path)

    return run


def last_step(out_dir) -> int:
    return read_events(out_dir, "finished")[-1]["step"]


def test_a_run_is_chosen_trained_to_its_end_and_never_chosen_again(auto_run, tmp_path):
    out = tmp_path / "out"
    first = auto_run()
    assert first.returncode == 0, first.stderr
    for topic in ("recipe", "shape", "step", "rates", "course"):
        assert f"auto    {topic}: " in first.stdout
    written, (fixed,) = (out / "auto.py").read_bytes(), read_events(out, "length fixed")
    assert last_step(out) == fixed["max_iters"]
    shape, learn, _ = load_config([str(out / "auto.py")])
    told = read_records(out, "run")[0]["settings"]
    assert all(told[name] == value for name, value in vars(shape).items())
    assert (told["batch_size"], told["optimizer"]) == (learn.batch_size, "muon")

    again = auto_run()
    assert f"the run is complete at step {fixed['max_iters']}" in again.stdout
    assert f"chosen before: {out / 'auto.py'}" in again.stdout
    alone = processes.run_script("train.py", str(out / "auto.py"), cwd=tmp_path)
    assert f"the run is complete at step {fixed['max_iters']}" in alone.stdout

    refused = auto_run("--hours=7")
    assert refused.returncode == 2 and "hours = 0.002 (now 7.0)" in refused.stderr

    longer = ("--hours=None", f"--max_iters={fixed['max_iters'] + 3}")
    extended = auto_run(words=(str(out / "auto.py"), *WITHOUT_LENGTH, *longer))
    assert extended.returncode == 0, extended.stderr
    assert last_step(out) == fixed["max_iters"] + 3
    assert (out / "auto.py").read_bytes() == written


def test_a_choice_that_no_checkpoint_follows_yet_holds_for_what_it_was_made_for(auto_run, tmp_path):
    out = tmp_path / "out"
    auto_run()
    text = (out / "auto.py").read_text()
    marked = text.replace("learning_rate = 0.025", "learning_rate = 0.0125")
    assert marked != text

    def begin_again(*flags: str):
        shutil.rmtree(out)
        out.mkdir()
        (out / "auto.py").write_text(marked)
        return auto_run(*flags)

    assert "chosen before" in begin_again().stdout
    assert (out / "auto.py").read_text() == marked
    assert "chosen before" not in begin_again("--n_layer=3").stdout
    shape, learn, _ = load_config([str(out / "auto.py")])
    assert (shape.n_layer, learn.learning_rate) == (3, 0.025)


def test_processes_learn_by_one_choice(auto_run, tmp_path):
    done = auto_run(ranks=2)
    assert done.returncode == 0, done.stderr
    learn = load_config([str(tmp_path / "out" / "auto.py")]).learn
    assert learn.sequences_per_step % 2 == 0
    assert read_records(tmp_path / "out", "run")[0]["machine"]["processes"] == 2


@pytest.mark.slow
def test_data_are_prepared_before_they_are_counted(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    texts = [f"Once upon a time there was a number {n}, and it was large. " * 9 for n in range(500)]
    pq.write_table(pa.table({"text": texts}), folder / "0.parquet")
    words = ["--model=auto", *SHORT, f"--dataset={folder}", f"--out_dir={tmp_path / 'out'}"]
    done = processes.run_script("train.py", *words, "--n_embd=16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "meta.json").exists()
    assert load_config([str(tmp_path / "out" / "auto.py")]).shape.n_embd == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=big"], "--model=big: --model=auto is all there is"),
        (["--hours=None"], "give --hours, as in --hours=5"),
        (["--max_iters=5"], "--hours and --max_iters each set the run's length"),
        (["--init_from=resume"], "no run in"),
        (["--eval_only=True"], "no run in"),
        (["--init_from=gpt2"], "--init_from=gpt2 brings its own"),
        (["--dataset=/nonexistent/mine"], "no data in /nonexistent/mine; make them with"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_what_cannot_be_chosen_is_refused_in_a_line_and_leaves_nothing(
    auto_run, tmp_path, flags, message
):
    done = auto_run(*flags)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_data_too_small_for_the_shortest_blocks_are_refused(tmp_path):
    folder = write_tiny_dataset(tmp_path)
    (folder / "meta.json").unlink()
    (folder / "val.bin").write_bytes(bytes(200))
    words = ["--model=auto", *SHORT, f"--dataset={folder}", f"--out_dir={tmp_path / 'out'}"]
    done = processes.run_script("train.py", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "has 100 tokens, too few for block_size = 128" in done.stderr


def test_a_run_that_was_not_chosen_is_not_taken_for_one(auto_run, tiny_run, tmp_path):
    tiny_run("--max_iters=2")
    done = auto_run()
    assert done.returncode == 2
    assert "holds a run that --model=auto did not choose; leave that out" in done.stderr
    assert not (tmp_path / "out" / "auto.py").exists()
