"""Sample metrics of runs."""

from typing import Any

from permille.schemas.runs import RunMetrics

RUN_ID = "5a0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"
OTHER_RUN_ID = "6b0d2d3c-1c51-4b71-9a53-0d4f1f2f7c11"


def metrics(**changes: Any) -> RunMetrics:
    """Return the metrics of an adopted run, with `changes`."""
    fields: dict[str, Any] = {
        "package_digest": "sha256:" + "a" * 64,
        "release": "tiny-llama",
        "version": 1,
        "outcome": "adopted",
        "began_at": "2026-11-20T10:00:00Z",
        "ended_at": "2026-11-20T10:01:00Z",
        "steps": 100,
        "rejected_steps": 0,
        "queries": 4,
        "method": "zeroth-order",
        "estimator": "spsa",
        "seconds": 12.5,
        "tokens_trained": 51200,
        "train_tokens": 9000,
        "select_tokens": 1000,
        "test_tokens": 2000,
        "loss_base": 5.2,
        "loss_personal": 5.0,
        "improvement_low": 0.1,
        "improvement_high": 0.3,
        "learning_rate": 0.01,
        "epsilon": 0.01,
        "step_unit_exponent": -30,
        "k": 100,
        "peak_rss_bytes": 1_000_000,
        "personal_bytes": 500,
        "state_digest": "sha256:" + "b" * 64,
        "agent_version": "0.1.0",
        "engine": "torch",
        "operating_system": "linux",
        "machine": "x86_64",
        "accelerator": "cpu",
        **changes,
    }
    return RunMetrics.model_validate(fields)
