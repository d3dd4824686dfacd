"""Shards spread over processes or machines by datatrove's executors, each as a run of its own."""

import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from nanofit.data.dataset import Options, is_done
from nanofit.data.source import Shard
from nanofit.files import PROJECT
from nanofit.terminal import InputError

ENGINES = ("local", "slurm", "ray")
ERROR_FILE = "error.log"  # not .txt, which is a shard where the output is in their folder


def prepare_each(
    shards: list[Shard],
    commands: list[list[str]],
    folder: Path,
    options: Options,
    *,
    engine: str,
    settings: dict[str, str],
    overwrite: bool,
) -> list[Path] | None:
    """Have each shard's command fill a folder; the folders, or None while some are under way."""
    names = [f"{number:05d}-{Path(shard.name).stem}" for number, shard in enumerate(shards)]
    parts = [(folder / "shards" / name).resolve() for name in names]

    def unfinished(*, overwrite: bool) -> list[int]:
        return [
            number
            for number, shard in enumerate(shards)
            if not is_done(
                parts[number],
                [shard],
                replace(options, limit_docs=options.limit_docs and shard.rows),
                overwrite=overwrite,
            )
        ]

    todo = unfinished(overwrite=overwrite)
    if todo:
        print(f"shards {len(shards)}  to do {len(todo)}  engine {engine}", flush=True)
        tasks = [(parts[number], commands[number]) for number in todo]
        _run(tasks, engine, settings, logs=folder / "logs")
    left = [parts[number] for number in unfinished(overwrite=True)]
    _raise_failed(left, len(shards))
    if left:
        print(f"{len(left)} of {len(shards)} shards are under way; the same command merges them")
    return None if left else parts


@dataclass(frozen=True)
class ShardTasks:
    """What the engine runs: the command of a task's number; if it fails, its last line is kept."""

    tasks: list[tuple[Path, list[str]]] = field(repr=False)  # the engine would log them all

    def __call__(self, _data: None, rank: int, _world_size: int) -> None:
        part, command = self.tasks[rank]
        part.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*command, "--out", str(part)], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            (part / ERROR_FILE).write_text(lines[-1])


def _run(
    tasks: list[tuple[Path, list[str]]], engine: str, settings: dict[str, str], logs: Path
) -> None:
    for part, _ in tasks:
        (part / ERROR_FILE).unlink(missing_ok=True)
    # Tasks find this package wherever they start.
    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    values = {name: int(value) if value.isdigit() else value for name, value in settings.items()}
    try:
        executor = _executor_class(engine)(
            pipeline=[ShardTasks(tasks)],
            tasks=len(tasks),
            logging_dir=str(logs),
            skip_completed=False,  # meta.json says what is done
            **values,
        )
        executor.run()
    except (TypeError, ImportError, OSError) as error:
        # A setting it lacks or does not know, ray not installed, no sbatch on this machine.
        raise InputError(f"--engine {engine} with {values}: {error}") from error


def _executor_class(engine: str):
    try:
        from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError:
        raise InputError(f"--engine {engine} needs datatrove: pip install datatrove") from None
    classes = (LocalPipelineExecutor, SlurmPipelineExecutor, RayPipelineExecutor)
    return dict(zip(ENGINES, classes, strict=True))[engine]


def _raise_failed(unfinished: list[Path], total: int) -> None:
    failed = [part for part in unfinished if (part / ERROR_FILE).exists()]
    if failed:
        reason = (failed[0] / ERROR_FILE).read_text().removeprefix("error: ")
        raise InputError(f"{len(failed)} of {total} shards failed; {failed[0].name}: {reason}")
