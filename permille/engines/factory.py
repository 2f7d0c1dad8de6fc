"""Opening an engine by name. torch is imported here, at the call, and nowhere above an engine."""

from permille.engines.interface import Engine
from permille.errors import InputError
from permille.package.reader import Package

ENGINES = ("torch",)


def open_engine(
    package: Package,
    name: str = "torch",
    *,
    device: str = "cpu",
    compute_dtype: str = "float32",
    threads: int | None = None,
) -> Engine:
    """Load a package into the engine of this name.

    Raises:
        InputError: an unknown name, or an engine whose extra is not installed.
        OperatorError, PackageError: as the engine says.
    """
    if name not in ENGINES:
        raise InputError(f"expected an engine of {', '.join(ENGINES)}; got {name!r}")
    try:
        from permille.engines.torch_engine import TorchEngine
    except ModuleNotFoundError as exc:
        if exc.name not in ("torch", "transformers"):
            raise
        raise InputError(
            f'engine "torch" needs {exc.name}, which is not installed: pip install "permille[torch]"'
        ) from exc
    return TorchEngine(package, device=device, compute_dtype=compute_dtype, threads=threads)
