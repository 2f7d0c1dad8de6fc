"""Which engine the agent computes with: the user's choice, opened on a package when it is needed."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from permille.engines.interface import Engine
    from permille.package.reader import Package

ENGINE_VARIABLE = "PERMILLE_AGENT_ENGINE"
AUTO, LIGHT_INT8 = "auto", "light-int8"

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar=ENGINE_VARIABLE,
        help="auto, light, light-int8 or torch. auto: light, which needs no torch, where it knows the model. "
        "light-int8: inputs of linear layers in 8 bits, faster for models of ten million weights and more, "
        "coarser; for int4 packages.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine that is not open yet.

    Attributes:
        name: "auto", "light", "light-int8" or "torch".
        device: cpu, or cuda with torch.
        threads: None leaves it to the engine.
    """

    name: str = AUTO
    device: str = "cpu"
    threads: int | None = None

    def __call__(self, package: "Package") -> "Engine":
        """Open it.

        Raises:
            InputError: an unknown name, or one whose extra is not installed.
        """
        from permille.engines.factory import open_engine

        return open_engine(
            package,
            name=self.name,
            device=self.device,
            threads=self.threads,
        )

    def begun_with(self, name: str) -> "EngineChoice":
        """This choice for a run that began with the engine `name`: "auto" stays with it."""
        return replace(self, name=name) if self.name == AUTO else self

    def for_any_package(self) -> "EngineChoice":
        """This choice where it opens any package: int8 activations want int4."""
        return replace(self, name=AUTO) if self.name == LIGHT_INT8 else self
