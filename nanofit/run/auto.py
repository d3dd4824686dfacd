"""A run whose model --model=auto chose: once; from then on the file that it wrote decides."""

from collections.abc import Sequence
from pathlib import Path

from nanofit.files import atomic_write
from nanofit.machine.dist import Ranks
from nanofit.outlook.choice import AUTO, data_for, read_asked
from nanofit.run.checkpoint import Checkpoints
from nanofit.run.here import choose_here
from nanofit.run.launch import prepare_if_needed
from nanofit.settings.config import Settings, load_config
from nanofit.terminal import InputError

FILE = "auto.py"  # in out_dir


def chosen_settings(words: Sequence[str], ranks: Ranks) -> Settings:
    """The settings of a run by its chosen model, which is chosen if there is none yet."""
    asked = read_asked(words)
    path = Path(asked.run.out_dir) / FILE
    is_open = False
    with ranks.all_or_none():
        is_open = ranks.is_main and not _is_chosen(path, words, asked)
    if ranks.any(is_open):
        prepare_if_needed(asked.run.data_dir, ranks)
        with ranks.all_or_none():
            if ranks.is_main:
                _choose(path, words, asked.run.data_dir, ranks)
    else:
        ranks.say(f"auto    chosen before: {path}")
    return load_config([str(path), *words])


def _is_chosen(path: Path, words: Sequence[str], asked: Settings) -> bool:
    """Whether a file tells what was chosen; before a run's first checkpoint it has to fit."""
    run, has_run = asked.run, Checkpoints(path.parent).exist()
    if path.exists():
        return has_run or load_config([str(path), *words]) == load_config([str(path)])
    if has_run:
        raise InputError(
            f"{run.out_dir} holds a run that {AUTO} did not choose; leave that out to continue it, "
            "or use another --out_dir"
        )
    if run.eval_only or run.init_from == "resume":
        raise InputError(f"no run in {run.out_dir}, of which {AUTO} could have chosen the model")
    return False


def _choose(path: Path, words: Sequence[str], folder: Path, ranks: Ranks) -> None:
    data = data_for(words, unique_tokens=None, shard=None)
    if data.train_tokens is None:
        raise InputError(
            f"no data in {folder}; make them with `python prepare_fineweb.py SHARD.parquet --out "
            f"{folder}`, or put the parquet file there"
        )
    choice = choose_here(words, data, ranks.world)
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(choice.config(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}); use another --out_dir") from None
    for one in choice.reasons[1:]:
        ranks.say(f"auto    {one.topic}: {one.told()}")
    ranks.say(f"auto    written to {path}, which from now on is the config of this run")
