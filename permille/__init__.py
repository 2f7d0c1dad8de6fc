"""permille: personalise a large language model by training one weight in a thousand.

These steps lead from a model to a personal model:

    import permille

    model = permille.load_model("model.gguf")
    mask = permille.sensitivity_mask(model, public_texts, density=0.001)
    package = permille.build_package(model, mask, "packages", texts=public_texts)

    personal = permille.Personalizer(package, "home")
    result = personal.fit(my_texts, minutes=10)
    print(result.message)
    print(personal.generate("What shall I plant in March?"))
    personal.export("gguf", "mine")

Importing this package imports nothing heavy: a name is loaded when it is first used. `permille/FORMAT.md`
defines the files that are written.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from permille.version import __version__

if TYPE_CHECKING:
    from permille.building import Model, build_package, load_model, sensitivity_mask
    from permille.choices import Embeddings
    from permille.errors import PermilleError
    from permille.package.build import ChosenAdapter, ChosenMask
    from permille.package.reader import Package
    from permille.quantization.types import Scheme
    from permille_agent.personalizer import Personalizer


__all__ = [
    "ChosenAdapter",
    "ChosenMask",
    "Embeddings",
    "Model",
    "Package",
    "PermilleError",
    "Personalizer",
    "Scheme",
    "__version__",
    "build_package",
    "load_model",
    "sensitivity_mask",
]

# Training is a part of the agent, so `Personalizer` is defined there. All other names are from this library.
_HOMES = {
    "ChosenAdapter": "permille.package.build",
    "ChosenMask": "permille.package.build",
    "Embeddings": "permille.choices",
    "Model": "permille.building",
    "Package": "permille.package.reader",
    "PermilleError": "permille.errors",
    "Personalizer": "permille_agent.personalizer",
    "Scheme": "permille.quantization.types",
    "build_package": "permille.building",
    "load_model": "permille.building",
    "sensitivity_mask": "permille.building",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'permille' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
