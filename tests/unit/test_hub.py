"""Tests of failures of the hub: the job that meets one learns when to try again."""

from types import SimpleNamespace

import pytest

from permille.hub import hub_failure


def answer(status: int, **headers: str) -> Exception:
    """Return an error with an answer of the hub, below an error of another library."""
    below, above = OSError("refused"), ConnectionError("cannot reach the hub")
    vars(below)["response"] = SimpleNamespace(
        status_code=status, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )
    above.__cause__ = below
    return above


@pytest.mark.parametrize(
    ("failed", "words", "wait_s"),
    [
        (
            answer(429, retry_after="196"),
            r"limits the rate .*\(429\) for a/b.* continues in 196 s",
            196,
        ),
        (answer(429, ratelimit='"api";r=0;t=55'), "continues in 55 s", 55),
        (answer(429, retry_after="0"), "continues in 1 s", 1),
        (answer(429), "continues in 60 s", 60),
        (answer(503, retry_after="30"), "continues in 30 s", 30),
        (answer(503), "answered 503 for a/b", None),
        (answer(500, retry_after="30"), "answered 500 for a/b", None),
        (TimeoutError("timed out."), "Cannot reach the hub for a/b: timed out. Check the network", None),
        (ValueError("no JSON"), "answer for a/b cannot be read: ValueError: no JSON.", None),
        (None, "Cannot reach the hub for a/b", None),
    ],
)
def test_a_limit_of_the_hub_names_the_time_to_wait(
    failed: Exception | None, words: str, wait_s: float | None
) -> None:
    failure = hub_failure(failed, "a/b")
    assert failure.retry_after_s == wait_s
    with pytest.raises(type(failure), match=words):
        raise failure
