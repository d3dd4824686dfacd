"""What a machine can do, for any settings: how fast it learns, and how much fits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanofit.memory.course import Need
from nanofit.memory.setup import Setup
from nanofit.outlook.plan import Speed
from nanofit.settings.config import Settings

TOKENS_OF_A_PASS = 16_384  # beyond it little is gained
BYTES_PER_PARAMETER = 12  # at least: weight, gradient, one moment


@dataclass(frozen=True)
class Capacity:
    """Of a machine, by what is published of its card or what was measured."""

    name: str
    tokens_per_s: Callable[[Settings], float] | None  # of a process; None: it has to be measured
    speed: Callable[[Settings], Speed] | None  # the same, with its source
    need: Callable[[Setup], Need]
    room_bytes: int | None  # for the tensors of a step; None: no limit is known
    dtype: str
    has_flash: bool = True
    gpu: str | None = None  # the card asked for; None: what is here
    processes: int = 1

    def largest_micro_batch(self, settings: Settings, sequences: int) -> int:
        """That cuts so many sequences evenly and fits without savers; 0 if not even one fits."""
        most = max(TOKENS_OF_A_PASS // settings.shape.block_size, 1)
        sizes = [size for size in range(min(most, sequences), 0, -1) if sequences % size == 0]
        if self.room_bytes is None:
            return sizes[0]
        if BYTES_PER_PARAMETER * settings.shape.parameters > self.room_bytes:
            return 0
        fitting = (size for size in sizes if self.needed_bytes(settings, size) <= self.room_bytes)
        return next(fitting, 0)

    def needed_bytes(self, settings: Settings, micro_batch_size: int) -> int:
        """The peak of a step, eager and compiled, by the account of its tensors."""
        shape, learn, run = settings
        eager = Setup(
            shape,
            dtype=self.dtype,
            loss=run.loss,
            recompute=run.recompute,
            activation_memory_budget=run.activation_memory_budget,
            optimizer=learn.optimizer,
            optimizer_bits=run.optimizer_bits,
            has_flash=self.has_flash,
            deterministic=run.deterministic,
        )
        setups = (eager, replace(eager, compiled=True))[: 1 + run.compile]
        return max(self.need(setup).at(micro_batch_size) for setup in setups)

    def with_speed_of(self, timed: Settings, measured: Speed) -> "Capacity":
        """The same, for any model as many FLOP/s and updates as fast as were measured for one."""
        tokens = timed.learn.sequences_per_step * timed.shape.block_size
        passes_s = tokens / measured.tokens_per_s - measured.update_s
        flops_per_s = tokens * timed.shape.flops_per_token / passes_s
        update_s = measured.update_s / timed.shape.parameters  # of each

        def tokens_per_s(settings: Settings) -> float:
            shape, learn, _ = settings
            pass_s = shape.flops_per_token / flops_per_s  # of each token
            tokens = learn.sequences_per_step * shape.block_size
            return 1 / (pass_s + update_s * shape.parameters / tokens)

        def speed(settings: Settings) -> Speed:
            source = measured.source
            if settings.shape != timed.shape:
                source += (
                    f" for {timed.shape.n_layer} layers, {timed.shape.n_embd} wide; as many FLOP/s "
                    "are assumed for this model"
                )
            return Speed(tokens_per_s(settings), measured.card, source)

        return replace(self, tokens_per_s=tokens_per_s, speed=speed)
