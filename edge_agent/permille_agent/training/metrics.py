"""The metrics of a run, the only thing that leaves the device by default: numbers and closed sets."""

import platform
import sys
from dataclasses import dataclass, field

from permille import __version__
from permille.engines.interface import EngineInfo
from permille.schemas.runs import (
    Accelerator,
    EngineName,
    Estimator,
    Machine,
    OperatingSystem,
    Outcome,
    RunMetrics,
)
from permille_agent.state.releases import InstalledRelease
from permille_agent.text.preparation import Prepared
from permille_agent.text.splits import Split
from permille_agent.training.options import TrainOptions
from permille_agent.training.run import Json

_SYSTEMS = {
    "Linux": OperatingSystem.LINUX,
    "Darwin": OperatingSystem.DARWIN,
    "Windows": OperatingSystem.WINDOWS,
}
_MACHINES = {
    "x86_64": Machine.X86_64,
    "AMD64": Machine.X86_64,
    "aarch64": Machine.AARCH64,
    "arm64": Machine.AARCH64,
    "armv7l": Machine.ARMV7,
    "riscv64": Machine.RISCV64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the metrics are made of; each part is empty where the run did not come so far."""

    release: InstalledRelease
    options: TrainOptions
    k: int
    outcome: Outcome
    seconds: float
    prepared: Prepared | None = None
    plan: Json = field(default_factory=dict)
    decision: Json = field(default_factory=dict)
    rejected_steps: int = 0
    tokens_trained: int = 0
    learning_rate: float = 0.0
    step_unit_exponent: int = 0
    log_bytes: int = 0
    shared_state_digest: str | None = None
    engine: EngineInfo | None = None


def run_metrics(facts: RunFacts) -> RunMetrics:
    """The report of one run."""
    counts = dict.fromkeys(Split, 0)
    if facts.prepared is not None:
        counts = {split: number.tokens for split, number in facts.prepared.counts.items()}
    against_base = facts.decision.get("against_base", {})
    device = "cpu" if facts.engine is None else facts.engine["device"].partition(":")[0]
    return RunMetrics(
        package_digest=facts.release.manifest_digest,
        release=facts.release.name,
        version=facts.release.version,
        outcome=facts.outcome,
        steps=int(facts.decision.get("steps", 0)),
        rejected_steps=facts.rejected_steps,
        queries=facts.options.queries,
        estimator=Estimator(facts.options.estimator.value),
        seconds=facts.seconds,
        tokens_trained=facts.tokens_trained,
        train_tokens=counts[Split.TRAIN],
        select_tokens=counts[Split.SELECT],
        test_tokens=counts[Split.TEST],
        loss_base=facts.decision.get("loss_base"),
        loss_personal=facts.decision.get("loss_personal"),
        improvement_low=against_base.get("low"),
        improvement_high=against_base.get("high"),
        learning_rate=facts.learning_rate,
        epsilon=float(facts.plan.get("epsilon", 0.0)),
        step_unit_exponent=facts.step_unit_exponent,
        k=facts.k,
        peak_rss_bytes=peak_rss_bytes(),
        log_bytes=facts.log_bytes,
        state_digest=facts.shared_state_digest,
        agent_version=__version__,
        engine=EngineName.TORCH if facts.engine is None else EngineName(facts.engine["name"]),
        operating_system=_SYSTEMS.get(platform.system(), OperatingSystem.OTHER),
        machine=_MACHINES.get(platform.machine(), Machine.OTHER),
        accelerator=Accelerator(device) if device in set(Accelerator) else Accelerator.OTHER,
    )


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
