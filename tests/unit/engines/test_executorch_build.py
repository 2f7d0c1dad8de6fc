"""Tests of building ExecuTorch's library, without ExecuTorch."""

from pathlib import Path

import pytest

from permille.engines.executorch import build as module
from permille.errors import OperatorError


@pytest.mark.parametrize("compiler", ["no-such-compiler", "env no-such-compiler"])
def test_a_compiler_that_is_not_there_needs_an_operator(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr(module, "runtime_folder", lambda: tmp_path)
    with pytest.raises(OperatorError, match=r"no-such-compiler.*No such file"):
        module.build(tmp_path / "library.so")
    assert not list(tmp_path.iterdir())
