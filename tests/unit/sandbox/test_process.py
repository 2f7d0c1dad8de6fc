"""Tests of the parent's side of the sandbox."""

import os

import pytest

from permille.sandbox import process
from permille.sandbox.process import Sandbox


def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(to: int, _back: int, data: bytes, _limit_s: float) -> bytes:
        os.write(to, data)
        raise KeyboardInterrupt

    def rendered(template: str) -> str:
        request = {"do": "render", "template": template, "variables": {}, "messages": [], "prompt": True}
        return str(sandbox.ask({**request, "prefixes": [], "limit": 9}, characters=9)["text"])

    sandbox = Sandbox()
    assert rendered("first") == "first"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(process, "_converse", interrupted)
        rendered("second")
    assert rendered("third") == "third"
    sandbox.close()
