"""The reader of settings: any text is settings or bad input, and never runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.settings.config import Settings, load_config
from nanofit.terminal import InputError
from tests.fuzz import fuzzed
from tests.hostile import bounded
from tests.mutations import damaged

VALID = b'''"""A run."""

out_dir = f"out-{5:03d}"
_tokens = 2 * 10**9
n_layer = 3
n_embd = 96
n_head = n_layer + 1
block_size = 128
arch = "modern"
optimizer = 'muon'
learning_rate = 5e-2
max_iters = _tokens // (batch_size * block_size)
lr_decay_iters = None
compile = not_a_name
memory_limit = "2GB"
sample_prompts = "One morning" + " | " + "The river"
hours = (-3 % 2) / 4
'''
PIECES = [
    *(b"(", b"[", b"{", b"-", b"~", b"not ", b"**", b"9**9**9", b"1e999", b"0x", b"1_", b"1j"),
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b" ", b"\\", b"#", b";", b"'", b'"""'),
    *(b"lambda: ", b"await ", b"*", b"f'{", b"f'{n_layer:{n_layer}}'", b"!r}", b":999d}", b"%"),
    *(b"import os", b"__import__('os')", b"exec('1')", b"x = x + x\n", b"= ", b"True", b"None"),
    *(
        b"-1",
        b"0",
        b"inf",
        b"nan",
        b"9" * 400,
        b"1e308*10",
        b"0.0",
        b"'x' * 9",
        b"_a",
        b"\xed\xa0\x80",
    ),
]
NAMES = [line.split(b" ")[0].decode() for line in VALID.splitlines() if b" = " in line]
text = st.one_of(
    st.sampled_from(PIECES).map(lambda piece: piece.decode(errors="replace")), st.text(max_size=40)
)


def settings_or_refusal(words: list[str]) -> None:
    with bounded():
        try:
            assert isinstance(load_config(words), Settings)
        except InputError as refused:
            assert 0 < len(str(refused)) < 20_000


@fuzzed
@given(content=damaged(VALID, PIECES))
def test_any_file_is_settings_or_bad_input(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.py"
    path.write_bytes(content)
    settings_or_refusal([str(path)])


@fuzzed
@given(name=st.sampled_from(NAMES) | text, value=text)
def test_any_flag_is_a_setting_or_bad_input(name, value):
    settings_or_refusal([f"--{name}={value}"])


def test_what_is_damaged_was_valid_but_for_a_name(tmp_path):
    path = tmp_path / "valid.py"
    path.write_bytes(VALID.replace(b"not_a_name", b"True"))
    assert load_config([str(path)]).shape.n_head == 4
    path.write_bytes(VALID)
    with pytest.raises(InputError, match="not_a_name has no value here"):
        load_config([str(path)])
