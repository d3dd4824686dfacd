"""No password and no token is written where others may read it."""

from pathlib import Path

import pytest

from nanofit.data.source import Shard
from nanofit.export.card import model_card
from nanofit.report.history import read_history
from nanofit.report.page import page_of
from nanofit.report.report import report_of
from nanofit.settings.config import RunConfig, flatten
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import redacted
from tests.conftest import run_tiny
from tests.processes import run_script
from tests.report.stories import event, launch, step, write

SECRET = "hunter2hunter2hunter2hunter2"
TOLD = [  # with a secret, and what is left of it
    (f"https://me:{SECRET}@host.example/a", "https://me:***@host.example/a"),
    (f"https://{SECRET}@host.example/a", "https://***@host.example/a"),
    (f"s3://key:{SECRET}@bucket/a", "s3://key:***@bucket/a"),
    (f"https://host/a?x=1&token={SECRET}&y=2", "https://host/a?x=1&token=***&y=2"),
    (f"https://host/a?X-Amz-Signature={SECRET}", "https://host/a?X-Amz-Signature=***"),
    (f"--wandb_api_key={SECRET}", "--wandb_api_key=***"),
    (f"hf_{SECRET}", "hf_***"),
    (f"of AKIA{SECRET} here", "of AKIA*** here"),
]
HARMLESS = [
    *("https://host.example/a@b/000_00000.parquet", "hf://datasets/a/b@main/c.parquet", "me@host"),
    *("python train.py config/x.py --out_dir=out-5 --sample_prompts='a token = 5 | key: x'",),
    *("data/hf_mirror", "out/sk-1", "--max_iters=100 --dataset=tokens/secret"),
]


@pytest.mark.parametrize(("text", "left"), TOLD)
def test_what_is_told_has_no_secrets(text, left):
    assert redacted(text) == left
    assert redacted(left) == left


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_is_told(text):
    assert redacted(text) == text


@pytest.mark.parametrize("name", ["out_dir", "dataset", "init_from", "sample_prompts"])
@pytest.mark.parametrize("text", [text for text, _ in TOLD])
def test_a_setting_with_a_secret_is_refused(name, text):
    (problem,) = RunConfig(**{name: text}).problems()
    assert problem.startswith(f"{name} holds a password or token")
    assert SECRET not in problem


def files_with(folder: Path, text: str) -> list[Path]:
    held = (file for file in folder.rglob("*") if file.is_file())
    return [file for file in held if text.encode() in file.read_bytes()]


def test_a_run_writes_no_secret_of_its_environment_or_command(tiny_dataset, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    done = run_tiny(tiny_dataset, "--report=True", out_dir=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    done = run_script("export.py", "out", "hf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*"))) > 10
    assert files_with(tmp_path, SECRET) == []
    assert files_with(tmp_path, "tokens_per_s")  # which is there to be found
    refused = run_tiny(tiny_dataset, f"--wandb_project=hf_{SECRET}", out_dir=tmp_path / "other")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert SECRET not in refused.stdout + refused.stderr
    assert files_with(tmp_path, SECRET) == []


def test_what_an_older_run_recorded_is_not_told_again(tmp_path):
    text = f"python train.py --wandb_run_name=https://me:{SECRET}@host/x"
    settings = {"wandb_run_name": f"https://me:{SECRET}@host/x"}
    story = [launch(settings=settings) | {"command": text}, step(0, 3.0), event(1, "finished")]
    history = read_history(write(tmp_path, story))
    shape = GPTConfig()
    saved = {"model_args": flatten(shape), "iter_num": 1}
    card = model_card("x", shape, saved, history, dtype="float32")
    page = page_of(report_of([history], made=0.0))
    for told in (card, page):
        assert SECRET not in told
        assert "https://me:***@host/x" in told


def test_a_shard_is_known_by_its_name_alone():
    rest = dict.fromkeys(Shard.__dataclass_fields__, 0)
    address = f"https://me:{SECRET}@host/a/000.parquet?token={SECRET}/x.parquet"
    assert Shard(**rest | {"location": address}).name == "000.parquet"
    assert Shard(**rest | {"location": "a/b?c/000.parquet"}).name == "000.parquet"


def test_an_address_that_fails_is_told_without_its_password(tmp_path):
    address = f"nowhere://me:{SECRET}@host/000.parquet"
    done = run_script("prepare_fineweb.py", address, "--out", str(tmp_path / "data"), cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere://me:***@host/000.parquet" in done.stderr
    assert SECRET not in done.stdout + done.stderr
