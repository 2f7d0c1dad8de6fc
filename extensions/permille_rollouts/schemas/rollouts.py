"""Rollouts, and the reports of devices about them."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints, field_validator, model_validator

from permille.errors import InputError
from permille.schemas.fields import (
    Closed,
    Count,
    Examples,
    Finite,
    Flag,
    Id,
    Name,
    Positive,
    Timestamp,
    WholeNumber,
)
from permille.schemas.releases import Version
from permille_rollouts.offer import ReportCode, RolloutState
from permille_rollouts.state_machine import MAX_DIFFERENCE, Reason, Rules
from permille_rollouts.windows import MAX_MINUTES, Window, check_steps

MAX_WAVES: Final = 20
# The API takes its defaults from the state machine, so that the two cannot differ.
_DEFAULT: Final = Rules()

Percent = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False, examples=[2.0])]
# A wave is a percentage of the group's devices, or a number of devices.
Wave = Annotated[
    str, StringConstraints(pattern=r"^([1-9][0-9]?%|100%|[1-9][0-9]{0,5})$"), Field(examples=["100%"])
]
Seconds = Annotated[int, Field(strict=True, ge=0, le=90 * 86_400), WholeNumber]


class OnStop(StrEnum):
    """The action of a rollout that halts: keep the version on devices, or revert it."""

    HOLD = "hold"
    REVERT = "revert"


class RolloutRules(Closed):
    """Conditions that end a wave, and limits that stop a rollout."""

    waves: Annotated[list[Wave], Flag("--wave")] = Field(
        default=list(_DEFAULT.waves),
        min_length=1,
        max_length=MAX_WAVES,
        description="share (`10%`) or number (`50`) of the group's devices in this and all earlier waves; "
        "repeat for each wave, up to `100%`",
    )
    min_reports: Positive = Field(
        default=_DEFAULT.min_reports,
        description="number of reports that a wave needs before the next wave opens",
    )
    soak_s: Seconds = Field(
        default=_DEFAULT.soak_s, description="a wave is open for at least this many seconds"
    )
    success_percent: Percent = Field(
        default=_DEFAULT.success_percent,
        description="success rate that a wave needs, among the devices that began",
    )
    failure_percent: Percent = Field(
        default=_DEFAULT.failure_percent,
        description="the rollout stops if the share of failures is significantly above this",
    )
    worse_percent: Percent = Field(
        default=_DEFAULT.worse_percent,
        description="the rollout stops if the share of worse models is significantly above this",
    )
    deadline_s: Seconds = Field(
        default=_DEFAULT.deadline_s,
        description="seconds after which a device without a result counts as silent",
    )
    approval: bool = Field(
        default=_DEFAULT.approval, description="each wave after the first waits for `rollouts approve`"
    )

    @model_validator(mode="after")
    def _check_waves(self) -> "RolloutRules":
        # How a share compares with a count is known only once the devices are known. So check here that the
        # shares grow and, separately, that the counts grow.
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
        description="opening times: minute, hour, day, month, weekday",
        examples=["0 2 * * *"],
    )
    minutes: Annotated[int, Field(strict=True, ge=1, le=MAX_MINUTES), WholeNumber] = Field(
        default=120, description="minutes for which the window stays open"
    )
    zone: str | None = Field(
        default=None,
        max_length=60,
        description="time zone (default: the device's own)",
        examples=["Europe/Berlin"],
    )

    @model_validator(mode="after")
    def _check(self) -> "MaintenanceWindow":
        try:
            # A device makes the same check, so the service never signs a window that a device refuses.
            Window(**self.model_dump())
        except InputError as exc:
            raise ValueError(str(exc)) from exc
        return self


class RolloutCreate(Closed):
    """Bring a version to the devices of an alias, wave by wave."""

    examples: ClassVar[Examples] = {
        "the newest version, in the usual waves": {"release": "tiny-llama"},
        "three waves, by night, reverted if it halts": {
            "release": "tiny-llama",
            "version": 2,
            "rules": {"waves": ["5%", "50%", "100%"], "soak_s": 86400},
            "window": {"cron": "0 2 * * *", "minutes": 180},
            "on_stop": "revert",
        },
    }

    release: Name = Field(examples=["tiny-llama"])
    version: Version | None = Field(default=None, description="version to roll out (default: the newest)")
    alias: Name = Field(default="stable", description="alias that the devices follow", examples=["stable"])
    group_id: Id | None = Field(default=None, description="group of devices to include (default: all)")
    rules: RolloutRules = RolloutRules()
    window: MaintenanceWindow | None = None
    on_stop: OnStop = Field(
        default=OnStop.HOLD,
        description="action when the rollout halts: keep the version on devices, or revert it",
    )
    draft: bool = Field(default=False, description="open no wave until `resume`")

    @field_validator("window")
    @classmethod
    def _check_steps(cls, window: MaintenanceWindow | None) -> MaintenanceWindow | None:
        if window is not None:
            try:
                check_steps(window.cron)
            except InputError as exc:
                raise ValueError(str(exc)) from exc
        return window


class RolloutApproval(Closed):
    """Permission to open the next wave of a rollout."""

    examples: ClassVar[Examples] = {"the second wave": {"wave": 2}}

    # The first wave opens without an approval.
    wave: Annotated[int, Field(strict=True, ge=2, le=MAX_WAVES), WholeNumber] = Field(
        description="number of the next wave"
    )


class WaveFunnel(Closed):
    """Progress of the devices of a wave."""

    size: Wave = Field(description="size of this and all earlier waves")
    offered: Count = Field(description="devices that began to install")
    installed: Count
    trained: Count = Field(description="devices that compared their new model with their old one")
    better: Count
    worse: Count
    failed: Count
    silent: Count


class Rollout(Closed):
    """A rollout as operators see it."""

    id: Id
    release: Name
    version: Version
    before: Version = Field(description="version of the alias before the rollout")
    alias: Name
    group_id: Id | None
    state: RolloutState
    wave: Positive = Field(description="number of the open wave, from 1")
    wave_devices: Count = Field(description="devices of the open wave, without earlier waves")
    awaits_approval: bool = Field(description="true if only an approval is missing for the next wave")
    rules: RolloutRules
    window: MaintenanceWindow | None
    on_stop: OnStop
    reason: Reason | None = Field(description="reason for which the rollout halted itself")
    numbers: dict[str, Finite] | None = Field(description="figures behind the reason")
    opened_at: Timestamp | None
    created_at: Timestamp
    ended_at: Timestamp | None
    funnel: list[WaveFunnel]


class RolloutReport(Closed):
    """A device's progress with the version of a rollout. A new report replaces the previous one."""

    examples: ClassVar[Examples] = {
        "the device begins": {},
        "installed and better": {"installed": True, "code": "ok", "worse": False, "difference": -0.01},
        "a damaged package": {"code": "integrity", "damage": "blob-digest"},
    }

    # The first report says that a device begins, so every field has a default.
    installed: bool = False
    code: ReportCode | None = Field(default=None, description="result, or null if the device has only begun")
    damage: (
        Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,39}$"), Field(examples=["blob-digest"])]
        | None
    ) = Field(default=None, description="error code of a refused package")
    worse: bool | None = Field(default=None, description="whether the retrained model is worse than before")
    # The device clips this value, so a report never tells how large an unusual change was.
    difference: (
        Annotated[float, Field(strict=True, ge=-MAX_DIFFERENCE, le=MAX_DIFFERENCE, allow_inf_nan=False)]
        | None
    ) = Field(
        default=None,
        description="clipped rise of the loss in nats per token; null if the owner shares only `worse`",
    )

    @model_validator(mode="after")
    def _check_code(self) -> "RolloutReport":
        if self.code is ReportCode.SILENT:
            raise ValueError("A device that reports is not silent.")
        return self
