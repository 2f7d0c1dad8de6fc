"""Rollouts, and what devices report of them."""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, StringConstraints, model_validator

from permille.errors import InputError
from permille.fleet.offer import ReportCode, RolloutState
from permille.fleet.rollouts import MAX_DIFFERENCE, Reason, Rules
from permille.fleet.windows import MAX_MINUTES, Window
from permille.schemas.fields import Closed, Count, Finite, Flag, Id, Name, Positive, Timestamp, WholeNumber
from permille.schemas.releases import Version

MAX_WAVES: Final = 20
_DEFAULT: Final = Rules()

Percent = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False, examples=[2.0])]
# A percentage of the group's devices, or a count of them.
Wave = Annotated[
    str, StringConstraints(pattern=r"^([1-9][0-9]?%|100%|[1-9][0-9]{0,5})$"), Field(examples=["100%"])
]
Seconds = Annotated[int, Field(strict=True, ge=0, le=90 * 86_400), WholeNumber]


class OnStop(StrEnum):
    """Action of a rollout that stops itself: keep the version on devices, or revert it."""

    HOLD = "hold"
    REVERT = "revert"


class RolloutRules(Closed):
    """Conditions that end a wave, and limits that stop a rollout."""

    waves: Annotated[list[Wave], Flag("--wave")] = Field(
        default=list(_DEFAULT.waves),
        min_length=1,
        max_length=MAX_WAVES,
        description="share (`10%`) or number (`50`) of the group's devices that have the version from this "
        "wave on; repeat, up to `100%`",
    )
    min_reports: Positive = Field(
        default=_DEFAULT.min_reports, description="of a wave's devices, before the next one opens"
    )
    soak_s: Seconds = Field(default=_DEFAULT.soak_s, description="seconds that a wave lasts at least")
    success_percent: Percent = Field(
        default=_DEFAULT.success_percent, description="of a wave's devices that began, to open the next wave"
    )
    failure_percent: Percent = Field(
        default=_DEFAULT.failure_percent, description="a share of failures surely above this stops it"
    )
    worse_percent: Percent = Field(
        default=_DEFAULT.worse_percent,
        description="a share of devices with a worse model surely above this stops it",
    )
    deadline_s: Seconds = Field(
        default=_DEFAULT.deadline_s, description="seconds after which a device that began is silent"
    )
    approval: bool = Field(
        default=_DEFAULT.approval, description="waves after the first also wait for `rollouts approve`"
    )

    @model_validator(mode="after")
    def _check_waves(self) -> "RolloutRules":
        for is_share in (True, False):
            sizes = [int(wave.removesuffix("%")) for wave in self.waves if wave.endswith("%") is is_share]
            if sizes != sorted(set(sizes)) or self.waves[-1] != "100%":
                raise ValueError(f"Waves must grow and end with 100%, got {', '.join(self.waves)}.")
        return self

    def parsed(self) -> Rules:
        """Convert the rules for the state machine."""
        return Rules(**{**self.model_dump(), "waves": tuple(self.waves)})


class MaintenanceWindow(Closed):
    """Times at which devices may begin to install."""

    cron: str = Field(
        max_length=100,
        description="when it opens: minute, hour, day, month, weekday",
        examples=["0 2 * * *"],
    )
    minutes: Annotated[int, Field(strict=True, ge=1, le=MAX_MINUTES), WholeNumber] = Field(
        default=120, description="how long it is open"
    )
    zone: str | None = Field(
        default=None,
        max_length=60,
        description="time zone; else the device's own",
        examples=["Europe/Berlin"],
    )

    @model_validator(mode="after")
    def _check(self) -> "MaintenanceWindow":
        try:
            Window(**self.model_dump())
        except InputError as exc:
            raise ValueError(str(exc)) from exc
        return self


class RolloutCreate(Closed):
    """Bring a version to the devices of an alias, wave by wave."""

    release: Name = Field(examples=["tiny-llama"])
    version: Version | None = Field(default=None, description="else the newest")
    alias: Name = Field(default="stable", description="whose devices take it", examples=["stable"])
    group_id: Id | None = Field(default=None, description="only devices of this group; else all")
    rules: RolloutRules = RolloutRules()
    window: MaintenanceWindow | None = None
    on_stop: OnStop = Field(default=OnStop.HOLD, description="what follows when it stops itself")
    draft: bool = Field(default=False, description="open no wave before `resume`")


class RolloutApproval(Closed):
    """Permission to open the next wave of a rollout."""

    wave: Annotated[int, Field(strict=True, ge=2, le=MAX_WAVES), WholeNumber] = Field(
        description="the wave that may open: the one after the open wave"
    )


class WaveFunnel(Closed):
    """Progress of the devices of a wave."""

    size: Wave = Field(description="of the group, earlier waves included")
    offered: Count = Field(description="devices that began to install")
    installed: Count
    trained: Count = Field(description="that compared their model with the one before")
    better: Count
    worse: Count
    failed: Count
    silent: Count


class Rollout(Closed):
    """A rollout as operators see it."""

    id: Id
    release: Name
    version: Version
    before: Version = Field(description="version of the alias when it was made")
    alias: Name
    group_id: Id | None
    state: RolloutState
    wave: Positive = Field(description="the open wave, from 1")
    wave_devices: Count = Field(description="devices of that wave alone")
    awaits_approval: bool = Field(description="only an approval is missing to open the next wave")
    rules: RolloutRules
    window: MaintenanceWindow | None
    on_stop: OnStop
    reason: Reason | None = Field(description="why it stopped itself")
    numbers: dict[str, Finite] | None = Field(description="by which it stopped itself")
    opened_at: Timestamp | None
    created_at: Timestamp
    ended_at: Timestamp | None
    funnel: list[WaveFunnel]


class RolloutReport(Closed):
    """Progress of a device with a rollout's version. A new report replaces the previous one."""

    installed: bool = False
    code: ReportCode | None = Field(default=None, description="how it ended; null: it has begun")
    damage: (
        Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,39}$"), Field(examples=["blob-digest"])]
        | None
    ) = Field(default=None, description="the code of a refused package")
    worse: bool | None = Field(default=None, description="whether the retrained model is worse than before")
    difference: (
        Annotated[float, Field(strict=True, ge=-MAX_DIFFERENCE, le=MAX_DIFFERENCE, allow_inf_nan=False)]
        | None
    ) = Field(
        default=None, description="nats per token by which it is worse, clipped; null where one bit is told"
    )

    @model_validator(mode="after")
    def _check_code(self) -> "RolloutReport":
        if self.code is ReportCode.SILENT:
            raise ValueError("A device that reports is not silent.")
        return self
