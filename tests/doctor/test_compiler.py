"""What is told of torch.compile after a child has tried it."""

import sys

import pytest

from nanofit.doctor.child import Answer
from nanofit.doctor.compiler import compile_findings
from nanofit.doctor.system import System

LINUX = System("Linux", "3.12.1", 8)


@pytest.mark.skipif(sys.platform == "win32", reason="has another compiler")
@pytest.mark.parametrize(("tool", "known"), [("g++", ", by g++"), ("ls", "")])
def test_that_compiling_works_is_told_with_the_compiler_if_it_is_known(
    tmp_path, monkeypatch, tool, known
):
    (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    [found] = compile_findings(LINUX, Answer({"seconds": 4.2}, 0, "", 9.0), on_card=False)
    assert found.text == f"torch.compile works{known}; a small function took 4 s"
    assert found.state == "ok"
