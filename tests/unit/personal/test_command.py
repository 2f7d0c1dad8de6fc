"""Tests of what `permille personalise` says while it works, and when it is stopped."""

import signal
import sys

import pytest

from permille.exits import CommandError, Exit
from permille_personal.command import KEPT, Part, Shown, _stoppable


def test_each_line_of_progress_names_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    with Shown(quiet=False) as shown:
        shown.begin(Part.MASK, "the sensitive weights")
        for done in range(1, 4):
            shown.progress(done / 3, f"fisher {done}/3")
        shown.begin(Part.WEIGHTS, "in few bits")
        shown.progress(0.5, "quantize 1/2")
    told = capsys.readouterr()
    assert told.out.splitlines() == ["1 of 5, mask: the sensitive weights", "2 of 5, weights: in few bits"]
    assert told.err.splitlines() == [
        "1 of 5, mask: fisher 1/3: 33 % done",
        "2 of 5, weights: quantize 1/2: 50 % done",
    ]


def test_a_pipe_gets_the_time_left_twice_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 10.0, 30.0, 60.0, 70.0])
    with Shown(quiet=False, clock=lambda: next(times)) as shown:
        shown.begin(Part.WEIGHTS, "in few bits")
        for done, message in enumerate(["opening", *(f"quantize {done}/10" for done in (1, 3, 6, 10))]):
            shown.progress((0.0, 0.1, 0.3, 0.6, 1.0)[done], message)
    assert capsys.readouterr().err.splitlines() == [
        "2 of 5, weights: opening: 0 % done",
        "2 of 5, weights: quantize 1/10: 10 % done",
        "2 of 5, weights: quantize 6/10: 60 % done, 40 s left",  # half of it in 50 s
    ]


@pytest.mark.parametrize("part", [None, *Part])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_what_is_kept_and_how_to_go_on(
    part: Part | None, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/permille", "personalise", "--text", "my notes"])
    shown, before = Shown(quiet=True), signal.getsignal(signal.SIGTERM)
    with pytest.raises(CommandError) as stopped, _stoppable(shown):
        if part is not None:
            shown.begin(part, "")
        signal.raise_signal(number)  # to this thread: of a process, any thread may take it later
    where = f"in part {part.place}" if part else "before the first part"
    assert str(stopped.value) == (
        f"Stopped {where}. Kept: {KEPT[part]}. "
        "To go on, run the same command again: permille personalise --text 'my notes'"
    )
    assert stopped.value.code is Exit.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before
