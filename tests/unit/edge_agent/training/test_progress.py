"""What the terminal shows of a run."""

import io

from rich.console import Console

from permille_agent.training.progress import BarProgress


def test_the_bar_shows_phase_loss_rate_and_held_out_loss() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)

    with BarProgress(console) as bar:
        bar.evaluated(0, 5.0, 5.0)
        bar.phase("finding epsilon")
        bar.step(3, 8, 4.25)
        bar.evaluated(3, 4.5, 5.0)
        bar.step(4, 8, 4.25)

    shown = out.getvalue()
    assert "finding epsilon" in shown
    assert "4/8" in shown
    assert "loss 4.250" in shown
    assert "4.500 at 3 (base 5.000)" in shown
    assert "steps/s" in shown
