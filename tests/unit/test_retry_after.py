"""Tests of the time that servers ask to wait."""

import pytest

from permille.retry_after import LONGEST_S, stated_wait_s

NOW = "Wed, 21 Oct 2026 07:28:00 GMT"  # 1792567680 seconds after 1970 began


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "120"}, 120),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2026 07:30:00 GMT"}, 120),
        ({"retry-after": "Wed, 21 Oct 2026 07:30:00"}, 120),
        ({"retry-after": "Wed, 21 Oct 2026 07:00:00 GMT"}, 0),
        ({"retry-after": "-5"}, 0),
        ({"retry-after": "nan"}, 0),
        ({"retry-after": "inf"}, LONGEST_S),
        ({"retry-after": "9" * 400}, LONGEST_S),
        ({"ratelimit": '"api";r=0;t=55', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}, 55),
        ({"ratelimit": "limit=100, remaining=0, reset=50"}, 50),
        ({"ratelimit-reset": "30"}, 30),
        ({"x-ratelimit-limit": "60", "x-ratelimit-reset": "1792567980"}, 300),
        ({"x-rate-limit-reset": "7"}, 7),
        ({"retry-after": "soon", "ratelimit-reset": "30"}, 30),
        ({"retry-after": "10", "ratelimit-reset": "30"}, 10),
        ({"retry-after": "", "ratelimit": "t=x", "x-ratelimit-reset": "later"}, None),
        ({}, None),
    ],
)
def test_the_wait_is_read_from_every_form_of_header(headers: dict[str, str], wait_s: float | None) -> None:
    assert stated_wait_s({"date": NOW, **headers}) == wait_s
