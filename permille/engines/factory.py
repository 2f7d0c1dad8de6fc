"""Open an engine by name. torch is imported only when it is needed.

"auto" takes the light engine if it supports the package's model, the device and the compute dtype. Otherwise,
"auto" takes torch. Every installation includes the light engine.
"""

import logging

from permille.choices import EngineName, choice_of
from permille.engines.interface import Engine
from permille.errors import InputError
from permille.extras import install_line
from permille.models.architecture import architecture_of
from permille.package.reader import Package

AUTO, LIGHT, LIGHT_INT8 = EngineName.AUTO, EngineName.LIGHT, EngineName.LIGHT_INT8
EXECUTORCH = EngineName.EXECUTORCH


def open_engine(
    package: Package,
    name: str = AUTO,
    *,
    device: str = "cpu",
    compute_dtype: str = "float32",
    threads: int | None = None,
) -> Engine:
    """Load a package into an engine.

        engine = open_engine(package, "light", threads=4)

    Args:
        package: the package.
        name: "auto"; "light", which computes on a CPU in float32; "light-int8", which rounds the inputs of
            linear layers to 8 bits and needs an int4 package; "torch", which also supports CUDA and
            bfloat16; "executorch", which runs the package's program.
        device: the device of torch.
        compute_dtype: the compute dtype of torch.
        threads: the number of threads. None lets the engine choose.

    Raises:
        InputError: the name is unknown, the engine's extra is not installed, or the engine does not support
            the package or an argument.
        OperatorError: torch does not find the device.
        PackageError: the package breaks its format, or its program was not fetched or belongs to another
            package.
    """
    chosen = choice_of(EngineName, name, "an engine")
    # All engines support float32 on cpu. Only torch supports anything else.
    plain = device == "cpu" and compute_dtype == "float32"
    if chosen is EngineName.TORCH or (chosen is AUTO and not (plain and _light_knows(package))):
        return _torch(package, device, compute_dtype, threads)
    if not plain:
        raise InputError(
            f'The engine "{chosen}" supports only float32 on cpu, not {compute_dtype} on {device}. '
            'Use the engine "torch".'
        )
    if chosen is EXECUTORCH:
        from permille.engines.executorch.engine import ExecutorchEngine

        return ExecutorchEngine(package, threads=threads)
    from permille.engines.light.engine import LightEngine

    return LightEngine(package, threads=threads, int8=chosen is LIGHT_INT8)


def _light_knows(package: Package) -> bool:
    try:
        architecture_of(package.config)
    except InputError:
        return False
    return True


def _torch(package: Package, device: str, compute_dtype: str, threads: int | None) -> Engine:
    # On a CPU, bitsandbytes warns about a missing optional package whose kernels are not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from permille.engines.torch_engine import TorchEngine
    except ModuleNotFoundError as exc:
        # Any other missing module means a broken installation. Python's message names the module.
        if exc.name not in ("torch", "transformers", "bitsandbytes"):
            raise
        raise InputError(
            f'The engine "torch" needs {exc.name}, which is not installed. Run {install_line("torch")}.'
        ) from exc
    return TorchEngine(package, device=device, compute_dtype=compute_dtype, threads=threads)
