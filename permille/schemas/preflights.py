"""Preflights: whether the machine can hold a piece of work, with figures, before it is accepted."""

from typing import Annotated, Literal

from pydantic import Field

from permille.schemas.fields import Closed
from permille.schemas.masks import MaskCreate
from permille.schemas.packages import BuildCreate, PackageCreate, PoolingCreate
from permille.schemas.problems import Figure
from permille.schemas.quantizations import QuantizationCreate


class MaskPreflight(Closed):
    """Ask for a mask job."""

    kind: Literal["mask"]
    request: MaskCreate


class QuantizationPreflight(Closed):
    """Ask for a quantization job."""

    kind: Literal["quantization"]
    request: QuantizationCreate


class PackagePreflight(Closed):
    """Ask for a package job."""

    kind: Literal["package"]
    request: PackageCreate


class BuildPreflight(Closed):
    """Ask for a build."""

    kind: Literal["build"]
    request: BuildCreate


class PoolingPreflight(Closed):
    """Ask for a pooling job."""

    kind: Literal["pooling"]
    request: PoolingCreate


PreflightCreate = Annotated[
    MaskPreflight | QuantizationPreflight | PackagePreflight | BuildPreflight | PoolingPreflight,
    Field(discriminator="kind"),
]


class Preflight(Closed):
    """What the work needs and whether the machine has it."""

    accepted: bool
    figures: list[Figure]
