"""Participation of this device in a rollout of a new version.

A rollout gives the version to more and more devices, in waves. Signed metadata says which devices belong to
an open wave (`permille_rollouts.offer`), so the device decides without asking the service:

- It installs the version when its wave is open, and trains on it as usual.
- It reports the result as one code. If it has compared the earlier and the new model, it also reports the
  difference of their losses, as one rounded number or one bit.
- It keeps the earlier package until the rollout has ended.
- A failed installation is tried `MAX_ATTEMPTS` times. Then the device returns to the version of its alias.

`rollout.json` is written before each action that it describes. So a kill loses no report.
"""

import logging
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import psutil

from permille.errors import InputError, OperatorError, PackageError, PermilleError
from permille.schemas.runs import EngineName, Outcome
from permille.trust.roles import rollout_path, target_path
from permille.version import __version__
from permille_agent.link.api import DeviceApi
from permille_agent.link.client import AccessRefusedError, RequestRefusedError
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.rounding import rounded_difference
from permille_agent.link.trust import TrustedReleases
from permille_agent.state.choices import read_references
from permille_agent.state.home import Home, Record, read_record, write_record
from permille_agent.state.models import DAMAGED, InstalledRelease, installed_release
from permille_agent.state.policy import Policy, read_policy
from permille_agent.training.decision import Decision
from permille_agent.training.engines import EngineUsed
from permille_agent.training.outcome import RunOutcome
from permille_agent.training.run import BegunRun, RunFolder, list_runs
from permille_rollouts.offer import Facts, Offer, ReportCode, RolloutState
from permille_rollouts.schemas.groups import FactsPut
from permille_rollouts.schemas.rollouts import RolloutReport
from permille_rollouts.state_machine import MAX_DIFFERENCE, WORSE_NATS

MAX_ATTEMPTS: Final = 3
FIRST_PAUSE_S: Final = 900.0  # after the first failure; each later pause is twice as long
_LONGEST_PAUSE_S: Final = 86_400.0
_GIB: Final = 1 << 30

log = logging.getLogger("permille.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of a model on the test split. `data` is the digest of the text."""

    data: str
    per_token: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """The participation of this device in one rollout, called its part.

    Attributes:
        rollout: id of the rollout.
        version: version to try.
        before: release that was installed at the start, kept until the rollout ends.
        losses: losses of the newest run on the earlier release.
        attempts: number of failed attempts.
        not_before: Unix time of the next attempt.
        installed: whether the version is installed.
        code: result of the part, or None before its end.
        damage: code of the `PackageError` that ended the part, or None.
        difference: rise of the loss by the new version, in nats per token.
        told: whether the service knows the current state.
    """

    rollout: str
    version: int
    before: InstalledRelease | None
    losses: Losses | None
    attempts: int = 0
    not_before: float = 0.0
    installed: bool = False
    code: ReportCode | None = None
    damage: str | None = None
    difference: float | None = None
    told: bool = False

    @property
    def failed(self) -> bool:
        """True if the part failed. The device then follows its alias."""
        return self.code not in (None, ReportCode.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """Contents of `rollout.json`: the facts that the service knows, and the part in a rollout."""

    facts: Facts | None = None
    part: Participation | None = None


def read_standing(home: Home) -> RolloutRecord:
    """Read `rollout.json`. A damaged one counts as none, and the next pull writes it again.

    Then the facts are sent again, and a part begins again. So the damage must not stop pulls and reports.
    """
    try:
        return read_record(home.rollout, RolloutRecord) or RolloutRecord()
    except OperatorError as exc:
        log.warning("rollout: %s", exc)
        return RolloutRecord()


def take_part(
    home: Home, api: DeviceApi, trusted: TrustedReleases, enrolment: Enrolment, *, now_s: float
) -> Participation | None:
    """Begin or continue a part. Return the part if its version must be installed now.

    None means that this pull follows the alias, even if a part waits.

    Raises:
        PackageError: the signed metadata is not consistent.
        RetryableError, OperatorError: the service cannot be reached, or the disk is full.
    """
    facts = own_facts(home)
    tell_facts(home, api, facts)
    offer = _offer(trusted, enrolment)
    part = _judged(home)
    may_begin = offer is not None and offer.may_begin(datetime.fromtimestamp(now_s, UTC))
    # The rollout of the part has ended, so its last report is sent and the part is forgotten.
    if part is not None and (offer is None or offer.rollout != part.rollout):
        _tell(home, api)
        _keep(home, None)
        part = None
    # The service's own key signs offers. So a version counts only if the team's keys have signed it, too.
    if offer is None or trusted.find(target_path(enrolment.release, offer.version)) is None:
        return None
    if part is None:
        if not (may_begin and offer.is_for(enrolment.device_id, facts)):
            return None
        before = installed_release(home)
        part = Participation(
            rollout=offer.rollout,
            version=offer.version,
            before=before,
            losses=None if before is None else _losses_of(_newest_run(home, before.manifest_digest)),
        )
        _keep(home, part)
    if not _tell(home, api) or part.failed:
        return None
    # A pause over the longest one was stored while the clock was wrong, so ignore it.
    waits = 0 < part.not_before - now_s <= _LONGEST_PAUSE_S
    waits = waits or not may_begin
    if not part.installed and (waits or offer.state is not RolloutState.RUNNING):
        return None
    return part


def note_installed(home: Home, api: DeviceApi) -> None:
    """Record that the part's version is installed, and report it."""
    part = read_standing(home).part
    if part is not None and not part.installed:
        _keep(home, replace(part, installed=True, told=False))
        _judged(home)
        _tell(home, api)


def note_failure(home: Home, error: PermilleError, *, now_s: float, is_crash: bool = False) -> None:
    """Count a failed attempt. `MAX_ATTEMPTS` failures end the part. Errors of the network do not count."""
    part, code = read_standing(home).part, ReportCode.CRASH if is_crash else _code_of(error)
    if part is None or part.code is not None or code is None:
        return
    attempts, here = part.attempts + 1, installed_release(home)
    ended = attempts >= MAX_ATTEMPTS
    _keep(
        home,
        replace(
            part,
            attempts=attempts,
            # If the new package did not open, the earlier one is installed now, and the attempt starts again.
            installed=part.installed and here is not None and here.version == part.version,
            not_before=now_s + min(_LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)),
            code=code if ended else None,
            damage=error.code if ended and isinstance(error, PackageError) else None,
            told=part.told and not ended,
        ),
    )


def finish(home: Home, code: ReportCode, difference: float | None = None) -> None:
    """End the part. The next poll reports it.

    Args:
        home: the home folder.
        code: the result.
        difference: rise of the loss by the new model, in nats per token.
    """
    part = read_standing(home).part
    if part is None or part.code is not None:
        return
    if difference is not None:
        difference = max(-MAX_DIFFERENCE, min(MAX_DIFFERENCE, difference))
        # Draw once, here, since a report may be sent again.
        difference = rounded_difference(difference, random.SystemRandom().random())
    _keep(home, replace(part, code=code, difference=difference, told=False))


def own_facts(home: Home) -> Facts:
    """Return the facts about this device.

    These are the agent's version, the engine of the newest run, the memory in bytes (rounded down to whole
    GiB), and the owner's tags.
    """
    used = next((used for _, used in _readable_runs(home, "engine", EngineUsed)), None)
    policy, known = _readable_policy(home), read_standing(home).facts
    memory = psutil.virtual_memory().total // _GIB * _GIB
    return Facts(
        agent_version=__version__,
        engine=None if used is None else used.name,
        memory_bytes=memory,
        tags=policy.tags if policy is not None else () if known is None else known.tags,
    )


def tell_facts(home: Home, api: DeviceApi, facts: Facts) -> None:
    """Send the facts to the service if they changed. Ignore the refusal of a service without groups."""
    if facts == read_standing(home).facts:
        return
    engine = facts.engine if facts.engine in set(EngineName) else None
    body = FactsPut(
        agent_version=facts.agent_version,
        engine=None if engine is None else EngineName(engine),
        memory_bytes=facts.memory_bytes,
        tags=list(facts.tags),
    )
    with suppress(RequestRefusedError):
        api.call("PUT", "/v1/device/facts", body=body.model_dump(mode="json"))
    write_record(home.rollout, replace(read_standing(home), facts=facts))


def difference_of(run: RunFolder, part: Participation) -> float | None:
    """Return the rise of the loss from the earlier model to a run's model, in nats per token.

    If the earlier personal model was still in use, the run's decision has compared the two models on the same
    text. Otherwise the losses of the two runs are compared, if the text has not changed. A memory never
    counts, because it could hide a worse release: then only the losses of the states are compared.

    Returns:
        The difference, or None if the models cannot be compared.
    """
    decision, losses = run.load("decision", Decision), _losses_of(run)
    if decision is None or part.before is None:
        return None
    compared = decision.incumbent.package == part.before.manifest_digest and not _has_memory(run, decision)
    if decision.against_active is not None and compared:
        return -decision.against_active.improvement
    if losses is None or part.losses is None or losses.data != part.losses.data:
        return None
    if not losses.bits_per_byte > 0:
        return None
    # The tokenizers may differ, so the relative change in bits per byte is applied to the new loss.
    return losses.per_token * (1 - part.losses.bits_per_byte / losses.bits_per_byte)


def _has_memory(run: RunFolder, decision: Decision) -> bool:
    """Return whether a run's model or the model that it was compared with may have a memory."""
    if decision.part.has_memory or decision.incumbent.run is None:
        return decision.part.has_memory
    with suppress(OperatorError):  # a damaged run must not hold back a pull
        before = RunFolder(run.path.with_name(decision.incumbent.run)).load("decision", Decision)
        return before is None or before.part.has_memory
    return True


def _offer(trusted: TrustedReleases, enrolment: Enrolment) -> Offer | None:
    target = trusted.find(rollout_path(enrolment.release, enrolment.alias))
    if target is None:
        return None
    try:
        return Offer.parse(target.custom)
    except InputError as exc:
        raise PackageError("rollout-malformed", str(exc)) from exc


def _judged(home: Home) -> Participation | None:
    """Return the part. End it first if a run on its version has finished, or if there is no text."""
    part, installed = read_standing(home).part, installed_release(home)
    if part is None or part.code is not None or not part.installed or installed is None:
        return part
    run = _newest_run(home, installed.manifest_digest)
    if run is not None:
        outcome = run.require("outcome", RunOutcome).metrics.outcome
        is_failed = outcome is Outcome.FAILED
        finish(home, ReportCode.CRASH if is_failed else ReportCode.OK, difference_of(run, part))
    elif not read_references(home):
        finish(home, ReportCode.OK)
    return read_standing(home).part


def _newest_run(home: Home, package: str) -> RunFolder | None:
    """Return the newest finished run on a package."""
    finished = {run.name for run, _ in _readable_runs(home, "outcome", RunOutcome)}
    for run, begun in _readable_runs(home, "run", BegunRun):
        if begun.definition.package == package and run.name in finished:
            return run
    return None


def _readable_runs(home: Home, name: str, kind: type[Record]) -> Iterator[tuple[RunFolder, Record]]:
    """Yield the runs with this result, the newest first.

    A damaged result is skipped, because it must not hold back a pull.
    """
    for run in reversed(list_runs(home)):
        try:
            found = run.load(name, kind)
        except OperatorError:
            continue
        if found is not None:
            yield run, found


def _readable_policy(home: Home) -> Policy | None:
    try:
        return read_policy(home)
    except InputError as exc:  # the owner's mistake stops trainings, and no pull
        log.warning("rollout: %s", exc)
        return None


def _losses_of(run: RunFolder | None) -> Losses | None:
    """Return the losses of a run's state if it is surely better than its base, else those of the base."""
    decision = None if run is None else run.load("decision", Decision)
    if run is None or decision is None:
        return None
    base, bits_per_byte = decision.loss_base, decision.bits_per_byte_base
    own = decision.state_against_base
    per_token = decision.loss_state if own is not None and own.better else base
    if per_token is None or bits_per_byte is None or not base:
        return None
    data = run.require("run", BegunRun).definition.data
    # Both losses are of the same tokens, so they have one ratio of bits per byte to nats per token.
    return Losses(data=data, per_token=per_token, bits_per_byte=bits_per_byte * per_token / base)


def _code_of(error: PermilleError) -> ReportCode | None:
    if isinstance(error, PackageError):
        if error.code in DAMAGED:
            return ReportCode.INTEGRITY
        return ReportCode.CRASH if error.code == "package-trial" else ReportCode.REFUSED
    # The error of a revoked device says nothing about the version.
    is_own = isinstance(error, OperatorError) and not isinstance(error, AccessRefusedError)
    return ReportCode.INSTALL if is_own else None


def _tell(home: Home, api: DeviceApi) -> bool:
    """Report the part's progress. Return whether the service still accepts the part."""
    part = read_standing(home).part
    if part is None or part.told:
        return part is not None
    number = part.difference
    policy = _readable_policy(home)
    # A bit says less than a number, so it is sent if the owner's choice cannot be read.
    is_bit = policy is None or policy.report_loss == "bit"
    body = RolloutReport(
        installed=part.installed,
        code=part.code,
        damage=part.damage,
        worse=None if number is None else number > WORSE_NATS,
        difference=None if is_bit else number,
    )
    try:
        api.call("PUT", f"/v1/device/rollouts/{part.rollout}/report", body=body.model_dump(mode="json"))
    except RequestRefusedError as exc:
        if exc.status not in (404, 409):
            raise OperatorError(f"The service refused the report of a rollout: {exc}") from exc
        # The wave closed before this device started, or the rollout no longer exists.
        _keep(home, None)
        return False
    _keep(home, replace(part, told=True))
    return True


def _keep(home: Home, part: Participation | None) -> None:
    write_record(home.rollout, replace(read_standing(home), part=part))
