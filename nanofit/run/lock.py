"""One run at a time in out_dir, whatever the number of its processes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nanofit.lock import only_one_in
from nanofit.machine.dist import Ranks
from nanofit.settings.config import RunConfig


@contextmanager
def only_run_in_folder(run: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Hold out_dir for this run; InputError, with who has it, if another one does."""
    with ExitStack() as held:
        with ranks.all_or_none():
            if ranks.is_main and not run.eval_only:  # which writes nothing
                held.enter_context(only_one_in(Path(run.out_dir), "out_dir"))
        yield
