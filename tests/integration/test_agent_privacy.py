"""Search all traffic and all logs for canaries from the user's text.

The tests use the real commands and the real engine: enroll, pull, train, report, and the daemon. They find a
canary in clear, in another case, URL-encoded, in hexadecimal, and in base64 at any offset. They also find
pieces of `PIECE` characters that are spread over fields or requests.
"""

import base64
import json
import random
import re
import socket
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import pytest

from tests.device_service import DeviceService, serving
from tests.integration.agent_site import AgentSite, Ended
from tests.packages import sentences, tiny_package

PIECE = 6
RNG = random.Random(20260301)
LETTERS = string.ascii_letters + string.digits
TEXT, PROMPT, COMPLETION, CHAT, GROUP, FILE_NAME, BAD_ROW, USER = (
    "".join(RNG.choices(LETTERS, k=24)) for _ in range(8)
)
POLICY = (
    "require_ac = false\nmin_battery = 0\nmax_load = 1000.0\nminutes_per_day = 1440\nminutes_per_run = 0.1\n"
)
CANARIES = (TEXT, PROMPT, COMPLETION, CHAT, GROUP, FILE_NAME, BAD_ROW, USER)


def write_user_data(folder: Path) -> Path:
    """Write enough text of a user for a training, with a canary in every place that a format has."""
    folder.mkdir()
    plain = [f"{line} {TEXT}" if number % 20 == 0 else line for number, line in enumerate(sentences(500))]
    for start in range(0, len(plain), 20):
        (folder / f"notes-{FILE_NAME}-{start}.txt").write_text("\n\n".join(plain[start : start + 20]))
    rows: list[object] = [
        {"text": f"{TEXT} {line}", "group": GROUP} if number % 9 == 0 else {"text": line}
        for number, line in enumerate(sentences(60, seed=1))
    ]
    rows.append({"prompt": PROMPT, "completion": COMPLETION})
    rows.append({"messages": [{"role": "user", "content": CHAT}, {"role": "assistant", "content": CHAT}]})
    rows.append({"text": 7, BAD_ROW: BAD_ROW})
    lines = [json.dumps(row) for row in rows] + [f'{{"text": "{BAD_ROW}']
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def forms(canary: str) -> Iterator[bytes]:
    """Yield all encodings of `canary`."""
    raw = canary.encode()
    yield raw
    yield quote(canary).encode()
    yield "".join(f"%{byte:02x}" for byte in raw).encode()
    yield raw.hex().encode()
    yield "".join(f"\\u{byte:04x}" for byte in raw).encode()
    for offset in range(3):
        # Characters that depend only on `raw`, not on the bytes beside it.
        known = slice(-(-offset * 8 // 6), (offset + len(raw)) * 8 // 6)
        yield base64.b64encode(bytes(offset) + raw)[known]
        yield base64.urlsafe_b64encode(bytes(offset) + raw)[known]


@cache
def views_of(data: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the data, URL-decoded and without punctuation, and each of them in lower case."""
    punctuation = bytes(byte for byte in range(256) if not chr(byte).isalnum())
    views = [data, unquote_to_bytes(data), data.translate(None, punctuation)]
    return views, [view.lower() for view in views]


def found(canary: str, data: bytes) -> list[bytes]:
    """Return the encodings and pieces of `canary` in `data`, also if URL-decoded or without punctuation."""
    views, lower = views_of(data)
    whole = [form for form in forms(canary) if any(form.lower() in view for view in lower)]
    pieces = [canary[i : i + PIECE].encode() for i in range(len(canary) - PIECE + 1)]
    return whole + [piece for piece in pieces if any(piece in view for view in views)]


def assert_clean(data: bytes, *, logged_here: bool = False) -> None:
    """Check that there is no canary in any form. Local logs may contain `USER` in the agent's folder."""
    for canary in CANARIES:
        assert found(canary, data) == [] or (canary is USER and logged_here)
    assert len(data) > 100


@dataclass(frozen=True)
class Walk:
    """The results of a session: first commands that send only metrics, then the daemon with a shared log."""

    site: AgentSite
    by_hand: tuple[Ended, ...]
    traffic_by_hand: bytes
    metrics_by_hand: dict[str, Any]
    logs_by_hand: int
    daemon: Ended
    traffic: bytes
    service: DeviceService


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Run the session on a device with canaries as names of user and folders. Every byte is recorded."""
    folder = tmp_path_factory.mktemp("privacy") / f"of-{USER}"
    folder.mkdir()
    data = str(write_user_data(folder / "data"))
    package = tiny_package(folder / "published")
    site = AgentSite(folder, USER=USER, LOGNAME=USER, HOSTNAME=USER)
    with serving(folder / "published") as service:
        service.publish(package.digest, 1)
        by_hand = (
            site.run("enroll", service.url, service.invitation),
            site.run("pull"),
            site.run("--log-level", "debug", "train", data, "--steps", "3"),
            site.run("--log-level", "debug", "report"),
        )
        seen = b"\n".join(service.traffic)
        metrics, logs = next(iter(service.runs.values()), {}), len(service.logs)
        site.json("data", "add", data)
        site.json("share-log", "on")
        (site.home / "policy.toml").write_text(POLICY)
        daemon = site.run("--log-level", "debug", "run", "--once")
        traffic = b"\n".join(service.traffic)
        yield Walk(site, by_hand, seen, metrics, logs, daemon, traffic, service)


@pytest.mark.parametrize("canary", CANARIES)
def test_the_search_finds_what_it_looks_for(canary: str) -> None:
    coded = [
        canary.encode(),
        quote(f"/{canary}/").encode(),
        b"xx" + canary.swapcase().encode(),
        canary.encode().hex().encode(),
        *(base64.b64encode(bytes(n) + canary.encode() + b"tail") for n in range(3)),
        *(base64.urlsafe_b64encode(bytes(n) + canary.encode() + b"tail") for n in range(3)),
        json.dumps({"a": canary[:12], "b": canary[12:]}).encode(),
        json.dumps([canary[i : i + PIECE] for i in range(0, 24, PIECE)]).encode(),
        "".join(f"%{ord(c):02X}" for c in canary).encode(),
        "".join(f"\\u{ord(c):04x}" for c in canary).encode(),
    ]
    assert all(found(canary, data) for data in coded)


@pytest.mark.slow
def test_by_default_only_numbers_leave_the_device(walk: Walk) -> None:
    assert [ended.code for ended in walk.by_hand] in ([0, 0, 0, 0], [0, 0, 7, 0]), walk.by_hand
    assert walk.metrics_by_hand["steps"] == 3
    assert walk.metrics_by_hand["state_digest"] is None
    assert walk.logs_by_hand == 0
    assert_clean(walk.traffic_by_hand)


def test_the_daemon_and_a_shared_log_send_no_text_either(walk: Walk) -> None:
    assert walk.daemon.code == 0, walk.daemon.errors
    assert "training ended" in walk.daemon.errors
    assert len(walk.service.runs) == 2
    shared = [metrics for metrics in walk.service.runs.values() if metrics["state_digest"] is not None]
    assert len(shared) == len(walk.service.logs)
    assert_clean(walk.traffic)


def test_nothing_is_sent_in_a_form_that_the_search_cannot_read(walk: Walk) -> None:
    assert b"\ncontent-encoding" not in walk.traffic.lower()
    assert b"\ntransfer-encoding" not in walk.traffic.lower()


def has_word(traffic: bytes, word: str) -> bool:
    """Return True if a word is in a line of text. Random bytes and tokens contain short words by chance."""
    lines = (line.decode(errors="replace") for line in traffic.splitlines())
    words = (re.findall(r"[A-Za-z0-9_.+=-]+", line) for line in lines if "\ufffd" not in line)
    return any(word in said for said in words)


def test_the_machine_is_not_named(walk: Walk) -> None:
    name = socket.gethostname()
    assert not has_word(walk.traffic, name)
    if len(name) > 6:  # longer names do not occur by chance
        assert name.encode() not in walk.traffic
    told_in = ('{"text": "é", "host": "%s"}', "user-agent: permille-agent (%s)", "/v1/devices/%s")
    for told in (form % name for form in told_in):
        assert has_word(walk.traffic + f"\n{told}\n".encode(), name)
    assert b"cookie" not in walk.traffic.lower()


def test_the_logs_of_the_device_hold_no_text(walk: Walk) -> None:
    printed = "".join(ended.output + ended.errors for ended in (*walk.by_hand, walk.daemon))
    assert_clean(printed.encode(), logged_here=True)


def test_the_device_talks_to_its_service_alone(walk: Walk) -> None:
    port = int(walk.service.url.rpartition(":")[2])
    assert walk.site.connections() <= {repr(("127.0.0.1", port)), repr(("127.0.0.1",))}
    assert repr(("127.0.0.1", port)) in walk.site.connections()
