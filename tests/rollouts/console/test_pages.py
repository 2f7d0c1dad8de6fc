"""The pages of rollouts."""

from datetime import datetime

from tests.api_service import Api
from tests.console.test_page_actions import signed_in
from tests.rollouts.service.test_api_rollouts import api, halted, moments

__all__ = ["api", "moments"]


def test_the_page_shows_the_funnel_and_why_it_stopped(api: Api, moments: list[datetime]) -> None:
    client = signed_in(api)
    assert "No rollouts yet" in client.get("/ui/rollouts").text
    rollout = halted(api, moments)
    assert "No rollouts yet" not in client.get("/ui/rollouts").text
    shown = client.get(f"/ui/rollouts/{rollout}").text
    assert "Halted by integrity." in shown and "50%" in shown
