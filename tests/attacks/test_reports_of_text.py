"""Text that reports could reveal with sharing off: losses and counts of guesses, tokenizers that count."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from permille.errors import PackageError
from permille.schemas.runs import RunMetrics
from permille.tokenizer_files import TextRules
from permille_agent.link.report import enqueue, read_report
from permille_agent.link.rounding import rounded
from permille_agent.state.home import open_home
from tests.unit.edge_agent.samples import RUN_ID, metrics

pytestmark = pytest.mark.attack(23, "exact numbers of a report confirm a guess of a text")

EXACT = {
    "began_at": datetime(2026, 3, 1, 9, 30, 12, 345678, UTC),
    "ended_at": datetime(2026, 3, 1, 9, 58, 59, 999999, UTC),
    "seconds": 1699.23456,
    "steps": 1237,
    "rejected_steps": 123,
    "tokens_trained": 987_654,
    "train_tokens": 7785,
    "select_tokens": 1099,
    "test_tokens": 1061,
    "loss_base": 8.12345678,
    "loss_personal": 7.785099610107617,
    "improvement_low": 0.3123456,
    "improvement_high": 0.3654321,
    "learning_rate": 0.00123456,
    "epsilon": 0.00098765,
    "peak_rss_bytes": 123_456_789,
    "personal_bytes": 54_321,
    "general_loss_base": 3.14159,
    "general_loss_personal": 3.16543,
}
KEPT = {"queries": 16, "k": 70_001, "version": 123_456, "step_unit_exponent": -17, "strength": 7}


def test_every_number_of_a_queued_report_is_rounded(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    enqueue(home, RUN_ID, metrics(**EXACT, **KEPT), shared_log=None)
    report = read_report(home, RUN_ID)
    assert report is not None and report.metrics is not None
    found = report.metrics.model_dump()
    for name, value in found.items():
        if type(value) is float:
            is_loss = "loss" in name or "improvement" in name
            assert value == (round(value, 2) if is_loss else float(f"{value:.2g}")), name
        elif type(value) is int and name not in KEPT:
            assert value == float(f"{value:.2g}"), name
        elif isinstance(value, datetime):
            assert value.microsecond == 0, name
            assert value.second == (0 if name == "began_at" else 59), name
    assert {name: found[name] for name in KEPT} == KEPT
    assert (found["loss_base"], found["loss_personal"], found["train_tokens"]) == (8.12, 7.78, 7800)
    assert rounded(report.metrics) == report.metrics


def test_every_number_of_the_schema_is_known_to_be_rounded_or_kept() -> None:
    numbers = {
        name
        for name, field in RunMetrics.model_json_schema()["properties"].items()
        for kind in field.get("anyOf", [field])
        if kind.get("type") in ("number", "integer")
    }
    changed = {name for name in EXACT if name not in ("began_at", "ended_at")}
    assert numbers == changed | set(KEPT)


@pytest.mark.parametrize("value", [0.0, -0.0, -0.004, 1e-300, 1e308, -1e308, 0.005, 2.675])
def test_losses_at_the_edges_stay_losses(value: float) -> None:
    found = rounded(metrics(loss_base=value, loss_personal=-value, improvement_low=value))
    assert found.loss_base is not None and math.isfinite(found.loss_base)
    assert abs(found.loss_base - value) <= 0.005 * 1.0001 + abs(value) * 1e-12
    assert not str(found.improvement_low).startswith("-0.0") or found.improvement_low != 0
    RunMetrics.model_validate_json(found.model_dump_json())


def test_losses_that_were_not_measured_stay_unknown() -> None:
    found = rounded(metrics(loss_base=None, loss_personal=None, general_loss_base=None))
    assert (found.loss_base, found.loss_personal, found.general_loss_base) == (None, None, None)


def test_guesses_of_a_pin_that_differ_by_less_than_the_rounding_look_alike() -> None:
    guesses = [7.785099610107617, 7.7861, 7.7889, 7.7903, 7.7912, 7.7949]
    assert len({rounded(metrics(loss_base=8.0, loss_personal=guess)).loss_personal for guess in guesses}) == 1


def test_a_gain_is_rounded_once() -> None:
    """Two rounded losses would differ by up to 0.01 from the gain."""
    found = rounded(metrics(loss_base=3.0049, loss_personal=2.9951))
    assert found.loss_base is not None and found.loss_personal is not None
    assert found.loss_base - found.loss_personal == pytest.approx(0.01)


def tokenizer(normalizer: Any = None, pre_tokenizer: Any = None) -> bytes:
    return json.dumps({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}).encode()


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


COUNTING = [
    tokenizer(replace({"String": "7"}, "x" * 7)),
    tokenizer(replace({"String": "7"}, "")),
    tokenizer(replace({"Regex": "[0-9]"}, " ")),
    tokenizer(replace({"String": " "}, " 1 2 3")),
    tokenizer(replace({"String": " "}, "9")),
    tokenizer({"type": "Sequence", "normalizers": [{"type": "NFC"}, replace({"String": "a"}, "aa")]}),
    tokenizer({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [{"type": "Nmt"}]}]}),
    tokenizer({"type": "Sequence", "normalizers": "NFC"}),
    tokenizer({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    tokenizer({"type": "Prepend", "prepend": "a long text"}),
    tokenizer({"type": "Unknown"}),
    tokenizer({}),
    tokenizer("NFC"),
    tokenizer(None, {"type": "FixedLength", "length": 1}),
    tokenizer(None, {"type": "CharDelimiterSplit", "delimiter": "7"}),
    tokenizer(None, {"type": "Split", "pattern": {"String": "7"}, "behavior": "Removed", "invert": False}),
    tokenizer(None, {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 1}]}),
    b"[",
]


@pytest.mark.attack(23, "a tokenizer that turns digits into as many tokens")
@pytest.mark.parametrize("data", COUNTING)
def test_a_tokenizer_that_could_count_is_refused(data: bytes) -> None:
    with pytest.raises(PackageError, match=r"^tokenizer:"):
        TextRules.read(data)


COMMON = [
    tokenizer(),
    tokenizer({"type": "NFC"}, {"type": "ByteLevel", "add_prefix_space": False}),
    tokenizer(
        {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")],
        }
    ),
    tokenizer(None, {"type": "Metaspace", "replacement": "▁"}),
    tokenizer(
        None,
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
                {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Removed", "invert": True},
                {"type": "ByteLevel"},
            ],
        },
    ),
]


@pytest.mark.parametrize("data", COMMON)
def test_common_tokenizers_are_read(data: bytes) -> None:
    assert "normalizer" in TextRules.read(data).describe()
