"""A step has the same sequences whatever the micro-batch, the ranks and the restarts."""

import json
import math
import tracemalloc
from itertools import count, islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanofit.data.loader import TrainSequences, ValSequences, mix, permuted
from nanofit.data.tokens import Bins, open_bins
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks
from nanofit.terminal import InputError

CPU = Device(torch.device("cpu"), "CPU", torch.float32, None, None)
BLOCK = 8
TOKENS = 1000  # token n is at position n, so that a batch tells where it was read
SEQUENCES = 12  # of a step
VOCABULARY = 2**16
GOLDEN_STARTS = [594, 282, 690, 402, 542, 646, 656]


@pytest.fixture
def bins(tmp_path):
    return write_bins(tmp_path, [TOKENS])


def write_bins(folder, sizes):
    """Files of these many tokens that together count upwards."""
    files = [folder / f"{number}.bin" for number in range(len(sizes))]
    borders = np.cumsum([0, *sizes])
    for file, (start, end) in zip(files, pairwise(borders), strict=True):
        np.arange(start, end, dtype=np.uint16).tofile(file)
    return Bins(files)


def train_data(bins, *, block=BLOCK, sequences=SEQUENCES, seed=1337, vocabulary=VOCABULARY):
    return TrainSequences(bins, block, vocabulary, CPU, sequences_per_step=sequences, seed=seed)


def val_data(bins, sequences, *, block=BLOCK, vocabulary=VOCABULARY):
    return ValSequences(bins, block, vocabulary, CPU, sequences=sequences)


def rows(batches):
    """The sequences in micro-batches as lists of block + 1 tokens, without filling."""
    return [
        [*idx.tolist(), targets[-1].item()]
        for batch in batches
        for idx, targets in zip(batch.idx, batch.targets, strict=True)
        if targets[0] != -1
    ]


def step_rows(data, step, size, world=1):
    """All sequences of a step, rank after rank."""
    return [
        row
        for rank in range(world)
        for row in rows(data.micro_batches(step, size, Ranks(rank, world)))
    ]


def epoch_starts(data, epoch):
    first = epoch * data.blocks_per_epoch
    return [data.start_of(first + number) for number in range(data.blocks_per_epoch)]


# the permutation


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 600), st.tuples(st.integers(0, 2**64), st.integers(0, 10**6)))
def test_the_permutation_is_a_bijection(size, key):
    assert sorted(permuted(n, size, key) for n in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 4096, 4097])
def test_the_permutation_is_a_bijection_at_powers_of_two_and_beside_them(size):
    assert {permuted(n, size, (1337, 0)) for n in range(size)} == set(range(size))


def test_the_permutation_of_a_huge_range_stays_inside_without_repeating():
    size = 10**12 + 7
    places = [permuted(n, size, (5, 3)) for n in range(2000)]
    assert len(set(places)) == 2000 and min(places) >= 0 and max(places) < size
    assert np.histogram(places, bins=10, range=(0, size))[0].min() > 150


# Of blocks of 1,024 tokens 1e10 are 10T tokens: more than FineWeb has.
HUGE, HUGE_KEY = 10**10, (1337, 0)
GOLDEN_PLACES = {0: 4469503780, 1: 127312849, 12345: 4078176829, 10**10 - 1: 1266786389}


def test_the_permutation_of_1e10_blocks_is_the_same_for_ever():
    """A run that has begun must find its sequences again."""
    assert {n: permuted(n, HUGE, HUGE_KEY) for n in GOLDEN_PLACES} == GOLDEN_PLACES


def test_the_permutation_of_1e10_blocks_is_undone_by_going_back():
    """A round at a time, with the halves changed over; and out of the range, on to the next."""
    for number in (0, 1, 7, HUGE // 3, HUGE - 1):
        assert unpermuted(permuted(number, HUGE, HUGE_KEY), HUGE, HUGE_KEY) == number


def unpermuted(place: int, size: int, key: tuple[int, ...]) -> int:
    half = max(math.ceil(math.log2(size) / 2), 1)
    while True:
        left, right = divmod(place, 2**half)
        for round_number in reversed(range(6)):
            left, right = right ^ mix(*key, round_number, left) % 2**half, left
        place = left * 2**half + right
        if place < size:
            return place


def test_any_sequence_of_1e10_is_found_in_constant_memory_and_time():
    """In the third epoch as in the first, and no array of them anywhere."""
    data = train_data(EndlessBins(HUGE * BLOCK + 1))
    assert data.blocks_per_epoch in (HUGE - 1, HUGE)
    sequences = [epoch * HUGE + place for epoch in (0, 2) for place in range(0, HUGE, HUGE // 500)]
    data.start_of(0)
    tracemalloc.start()
    starts = {data.start_of(sequence) for sequence in sequences}
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(starts) == len(sequences)
    assert min(starts) >= 0 and max(starts) + BLOCK < len(data.bins)
    assert peak_bytes < 2**18  # nothing but those starts


class EndlessBins:
    """As long as is said; nobody reads them."""

    def __init__(self, tokens: int):
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens


def test_every_place_is_reached_equally_often_over_the_keys():
    places = [permuted(0, 10, (seed, epoch)) for seed in range(50) for epoch in range(40)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared, 9 degrees, one in a thousand


def test_neighbours_do_not_stay_neighbours():
    places = np.array([permuted(n, 1000, (1337, 0)) for n in range(1000)])
    assert abs(np.corrcoef(places, np.arange(1000))[0, 1]) < 0.1
    assert (np.abs(np.diff(places)) == 1).sum() < 12


def test_mixing_is_splitmix_in_64_bit_arithmetic():
    def numpy_mix(*numbers):
        state = np.uint64(0)
        for number in numbers:
            state = (state ^ np.uint64(number)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
        return int(state)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator, seed 0
    with np.errstate(over="ignore"):
        for numbers in ((1,), (1337, 0), (2**64 - 1, 2**63), (3, 1, 4, 1, 5)):
            assert mix(*numbers) == numpy_mix(*numbers)


def test_the_order_of_the_data_never_changes(bins):
    """A run that is resumed with a later version must go on with the same sequences."""
    assert [train_data(bins).start_of(n) for n in (0, 1, 2, 122, 123, 124, 10**9)] == GOLDEN_STARTS


# epochs


@pytest.mark.parametrize("tokens", [17, 18, 24, 25, 31, 32, 33, 997, 1000, 1001])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_visits_every_block_once_and_no_token_twice(tmp_path, tokens, epoch):
    data = train_data(write_bins(tmp_path, [tokens]))
    starts = sorted(epoch_starts(data, epoch))
    assert all(after - before == BLOCK for before, after in pairwise(starts))
    assert 0 <= starts[0] < BLOCK
    assert starts[-1] + BLOCK + 1 <= tokens
    assert tokens - len(starts) * BLOCK <= 2 * BLOCK  # no more left out than the borders need


def test_the_batches_of_an_epoch_hold_every_token_of_it_once(bins):
    data = train_data(bins, sequences=41)
    steps = data.blocks_per_epoch // 41
    assert steps * 41 == data.blocks_per_epoch == 123
    seen = [row for step in range(steps) for row in step_rows(data, step, 41)]
    learnt_from = sorted(token for row in seen for token in row[:-1])
    predicted = sorted(token for row in seen for token in row[1:])
    first = learnt_from[0]
    assert learnt_from == list(range(first, first + 123 * BLOCK))
    assert predicted == list(range(first + 1, first + 1 + 123 * BLOCK))


def test_borders_and_order_move_between_epochs_and_seeds(bins):
    orders = [
        epoch_starts(train_data(bins, seed=seed), epoch) for seed in (1, 2) for epoch in range(8)
    ]
    offsets = {starts[0] % BLOCK for starts in orders}
    assert len(offsets) >= 5
    blocks = {tuple(start // BLOCK for start in starts) for starts in orders}
    assert len(blocks) == len(orders)


def test_every_offset_is_used_in_time(bins):
    data = train_data(bins)
    offsets = [data.start_of(epoch * data.blocks_per_epoch) % BLOCK for epoch in range(200)]
    assert np.bincount(offsets, minlength=BLOCK).min() > 10


def test_one_block_of_data_is_enough(tmp_path):
    data = train_data(write_bins(tmp_path, [BLOCK + 1]), sequences=2)
    assert step_rows(data, 3, 2) == [list(range(BLOCK + 1))] * 2


# steps


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 3, 5, SEQUENCES])
def test_a_step_has_the_same_sequences_for_any_micro_batch_and_ranks(bins, size, world):
    data = train_data(bins)
    tokens = np.arange(TOKENS)
    for step in (0, 1, 9, 10, 11, 5000):  # the first epoch ends in step 10
        starts = [data.start_of(step * SEQUENCES + n) for n in range(SEQUENCES)]
        expected = [tokens[start : start + BLOCK + 1].tolist() for start in starts]
        assert step_rows(data, step, size, world) == expected


def test_a_run_started_later_goes_on_with_the_same_sequences(bins):
    whole = [step_rows(train_data(bins), step, 4) for step in range(20)]
    one_after_another = train_data(bins)
    assert [step_rows(one_after_another, step, 4) for step in range(20)] == whole
    restarted = train_data(bins)
    assert [step_rows(restarted, step, 3) for step in range(13, 20)] == whole[13:]


def test_reading_ahead_never_changes_what_is_given_out(bins):
    """Peeked at, abandoned, cut anew in mid-run, evaluated in between: each step is its own."""
    data = train_data(bins)
    expected = [step_rows(train_data(bins), step, SEQUENCES) for step in range(6)]
    for step, size in enumerate((4, 4, 6, 1, 12, 5)):
        next(data.micro_batches(step, size, Ranks()))
        rows(islice(data.micro_batches(step, 2, Ranks()), 3))
        assert step_rows(data, step, size) == expected[step]


def test_ranks_read_different_sequences(bins):
    parts = [step_rows(train_data(bins), 0, 3)]
    parts += [rows(train_data(bins).micro_batches(0, 3, Ranks(rank, 4))) for rank in range(4)]
    whole, *ranks = [{row[0] for row in part} for part in parts]
    assert [len(part) for part in ranks] == [3, 3, 3, 3]
    assert set.union(*ranks) == whole


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 5, 7, SEQUENCES, 50])
def test_filling_rows_teach_nothing_and_shares_add_up_to_the_whole(bins, size, world):
    sequences_told = 0
    for rank in range(world):
        for batch in train_data(bins).micro_batches(3, size, Ranks(rank, world)):
            assert batch.idx.shape == batch.targets.shape == (size, BLOCK)
            assert batch.idx.dtype == batch.targets.dtype == torch.int64
            filling = (batch.targets == -1).all(dim=1)
            assert ((batch.targets == -1).any(dim=1) == filling).all()
            assert (batch.idx[filling] == 0).all()  # any valid token: an embedding is looked up
            real = size - int(filling.sum())
            assert real > 0
            assert batch.share == real / SEQUENCES
            sequences_told += real
    assert sequences_told == SEQUENCES


def test_targets_are_the_tokens_that_follow(bins):
    for batch in train_data(bins).micro_batches(0, 4, Ranks()):
        assert torch.equal(batch.idx + 1, batch.targets)


# several files


@pytest.mark.parametrize("sizes", [[1000], [500, 500], [1, 998, 1], [3] * 333 + [1]])
def test_several_bins_read_as_one(tmp_path, sizes):
    several = write_bins(tmp_path, sizes)
    whole = np.concatenate([np.fromfile(file, dtype=np.uint16) for file in several.files])
    assert len(several) == len(whole) == TOKENS
    for start in (*range(40), 490, 499, 500, 990):
        for length in (1, 2, 10):
            assert np.array_equal(several.read(start, length), whole[start : start + length])


def test_a_run_over_several_bins_is_the_run_over_their_concatenation(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one = train_data(write_bins(tmp_path / "one", [TOKENS]))
    many = train_data(write_bins(tmp_path / "many", [7, 493, 1, 499]))
    for step in range(12):
        assert step_rows(one, step, 4) == step_rows(many, step, 4)


# validation


@pytest.mark.parametrize("sequences", [1, 5, 30, 124, 5000])
def test_validation_windows_are_the_same_for_any_micro_batch_and_ranks(bins, sequences):
    data = val_data(bins, sequences)
    windows = min(sequences, (TOKENS - 1) // BLOCK)
    expected = None
    for size in (1, 3, 7, 200):
        for world in (1, 2, 3, 8):
            batches = [
                batch
                for rank in range(world)
                for batch in data.micro_batches(size, Ranks(rank, world))
            ]
            expected = expected or rows(batches)
            assert rows(batches) == expected
            assert len(expected) == windows
            assert sum(round(batch.share * windows) for batch in batches) == windows
            assert sum(batch.share for batch in batches) == pytest.approx(1, abs=1e-12)
            assert all(batch.idx.shape == (size, BLOCK) for batch in batches)


@pytest.mark.parametrize("sequences", [1, 5, 30, 124])
def test_validation_windows_are_spread_without_overlap(bins, sequences):
    starts = [row[0] for row in rows(val_data(bins, sequences).micro_batches(4, Ranks()))]
    gaps = np.diff([*starts, 124 * BLOCK])
    assert starts[0] == 0
    assert gaps.min() >= BLOCK
    assert gaps.max() - gaps.min() <= BLOCK


def test_evaluating_again_reads_the_same_windows(bins):
    data = val_data(bins, 10)
    first = rows(data.micro_batches(4, Ranks()))
    assert [rows(data.micro_batches(size, Ranks())) for size in (4, 3, 4)] == [first] * 3


# bad input


@pytest.fixture
def dataset(tmp_path):
    """A folder as prepare_fineweb.py leaves it."""
    splits = {}
    for split, tokens in (("train", 500), ("val", 100)):
        np.arange(tokens, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
        entry = {"file": f"{split}.bin", "tokens": tokens}
        splits[split] = {"tokens": tokens, "bins": [entry]}
    write_meta(tmp_path, {"format": 1, "vocab_size": 500, "splits": splits})
    return tmp_path


def write_meta(folder, meta):
    (folder / "meta.json").write_text(json.dumps(meta))


def change_meta(folder, change):
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    write_meta(folder, meta)


def refusal(folder, **options):
    """The message with which a folder is refused, which is one line."""
    with pytest.raises(InputError) as caught:
        open_bins(folder, **({"block_size": BLOCK, "vocab_size": 512} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_folder_is_opened_with_and_without_meta(dataset):
    for _ in range(2):
        train, val = open_bins(dataset, block_size=BLOCK, vocab_size=500)
        assert (len(train), len(val)) == (500, 100)
        assert val.read(90, 5).tolist() == [90, 91, 92, 93, 94]
        (dataset / "meta.json").unlink(missing_ok=True)  # as nanoGPT leaves it


def test_the_bytes_that_tokens_stand_for_are_known_where_the_meta_tells_them(dataset):
    def tell(meta):
        meta["splits"]["val"]["text_bytes"] = 432

    change_meta(dataset, tell)
    train, val = open_bins(dataset, block_size=BLOCK, vocab_size=500)
    assert (train.text_bytes, val.text_bytes) == (None, 432)


def test_several_bins_of_a_split_are_opened_in_the_order_of_the_meta(dataset):
    np.arange(500, 600, dtype=np.uint16).tofile(dataset / "more.bin")
    more = {"file": "more.bin", "tokens": 100}
    change_meta(dataset, lambda meta: meta["splits"]["train"]["bins"].insert(0, more))
    train, _ = open_bins(dataset, block_size=BLOCK, vocab_size=512)
    assert train.read(99, 2).tolist() == [599, 0]


def test_a_missing_folder_is_told_with_the_command_that_makes_it(tmp_path):
    told = refusal(tmp_path / "none")
    assert f"no dataset folder {tmp_path / 'none'}" in told and "prepare_fineweb.py" in told


@pytest.mark.parametrize("with_meta", [True, False])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "is missing; put a parquet file into"),
        (lambda file: file.write_bytes(b""), "is empty; prepare the dataset again"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, but should have"),
    ],
    ids=["missing", "empty", "truncated"],
)
def test_a_damaged_bin_is_told_by_name(dataset, with_meta, split, damage, reason):
    if not with_meta:
        (dataset / "meta.json").unlink()
    damage(dataset / f"{split}.bin")
    told = refusal(dataset)
    assert told.startswith(str(dataset / f"{split}.bin")) and reason in told


@pytest.mark.parametrize("tokens", [499, 501])
def test_a_bin_that_is_not_what_the_meta_says_is_told_with_both_sizes(dataset, tokens):
    np.zeros(tokens, dtype=np.uint16).tofile(dataset / "train.bin")
    told = refusal(dataset)
    assert f"{dataset / 'train.bin'} has {2 * tokens} bytes, but should have 1000" in told
    assert "prepare the dataset again" in told


def test_a_vocabulary_larger_than_the_models_is_told_with_the_size_to_use(dataset):
    told = refusal(dataset, vocab_size=499)
    assert "vocabulary of 500" in told and "vocab_size = 499; use at least 500" in told
    open_bins(dataset, block_size=BLOCK, vocab_size=500)


@pytest.mark.parametrize(("block", "file"), [(500, "train.bin"), (100, "val.bin")])
def test_too_few_tokens_for_one_block_are_told(dataset, block, file):
    told = refusal(dataset, block_size=block)
    assert f"{file} has {block} tokens, too few for block_size = {block}" in told
    assert "smaller block_size" in told


def test_as_many_tokens_as_one_block_needs_are_enough(dataset):
    _, val = open_bins(dataset, block_size=99, vocab_size=512)
    assert rows(val_data(val, 5, block=99).micro_batches(1, Ranks())) == [list(range(100))]


@pytest.mark.parametrize("text", ["", "{", '{"format": 1', "\0", "not json", "[]", "null", "7"])
def test_a_damaged_meta_is_told(dataset, text):
    (dataset / "meta.json").write_text(text)
    assert refusal(dataset) == f"{dataset / 'meta.json'} is damaged; prepare the dataset again"


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.update(splits=[]),
        lambda meta: meta.update(splits=None),
        lambda meta: meta.update(vocab_size="many"),
        lambda meta: meta["splits"].update(train=[]),
        lambda meta: meta["splits"]["train"].update(bins=[]),
        lambda meta: meta["splits"]["train"].pop("bins"),
        lambda meta: meta["splits"]["val"]["bins"][0].pop("file"),
        lambda meta: meta["splits"]["val"]["bins"][0].update(tokens="many"),
    ],
    ids=count(),
)
def test_a_meta_of_another_form_is_told(dataset, change):
    change_meta(dataset, change)
    assert refusal(dataset) == f"{dataset / 'meta.json'} is damaged; prepare the dataset again"


def test_a_token_beyond_the_vocabulary_is_told_when_it_is_read(dataset):
    (dataset / "meta.json").unlink()
    train, val = open_bins(dataset, block_size=BLOCK, vocab_size=450)
    assert rows(val_data(val, 12, vocabulary=450).micro_batches(4, Ranks()))
    data = train_data(train, sequences=62, vocabulary=450)
    with pytest.raises(InputError, match=r"train\.bin holds token 4\d\d, but vocab_size is 450"):
        rows(data.micro_batches(0, 62, Ranks()))


def test_the_vocabulary_ends_before_its_size(tmp_path):
    bins = write_bins(tmp_path, [BLOCK + 1])  # the last token is BLOCK
    assert len(step_rows(train_data(bins, sequences=1, vocabulary=BLOCK + 1), 0, 1)) == 1
    with pytest.raises(InputError, match=f"holds token {BLOCK}, but vocab_size is {BLOCK};"):
        step_rows(train_data(bins, sequences=1, vocabulary=BLOCK), 0, 1)
