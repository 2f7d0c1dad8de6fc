"""Tests of opening an engine by name, and of imports: torch only if an engine needs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from permille.engines.factory import open_engine
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.quantization.types import Scheme
from tests.packages import program_package
from tests.unit.engines.tiny import tiny_package
from tests.unit.package.tiny import write_tiny


@pytest.fixture
def package(tmp_path: Path) -> Package:
    blobs = BlobFolder(tmp_path)
    return Package.open(blobs, write_tiny(blobs).digest)


def test_an_unknown_engine_is_refused_with_the_list(package: Package) -> None:
    with pytest.raises(
        InputError,
        match=r"'abacus' is not an engine. Choose one of auto, light, light-int8, torch, executorch",
    ):
        open_engine(package, "abacus")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_extra_is_named(package: Package, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith("permille.engines.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"needs {missing}, .*pip install 'permille\[torch\]'"):
        open_engine(package, "torch")


def test_auto_takes_the_light_engine_where_it_can_and_torch_elsewhere(package: Package) -> None:
    assert open_engine(package).info()["name"] == "light"
    assert open_engine(package, "torch", compute_dtype="float32").info()["name"] == "torch"
    assert open_engine(package, compute_dtype="bfloat16").info()["name"] == "torch"
    package.config["hidden_act"] = "gelu_fast"
    assert open_engine(package).info()["name"] == "torch"


def test_the_light_engine_refuses_another_device(package: Package) -> None:
    for name in ("light", "light-int8"):
        with pytest.raises(
            InputError, match=f'"{name}" supports only float32 on cpu, not float32 on cuda.* engine "torch"'
        ):
            open_engine(package, name, device="cuda")


def test_a_runtime_that_is_not_installed_is_named(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="The package has no program"):
        open_engine(package, "executorch")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"needs its runtime: pip install --no-deps executorch"):
        open_engine(program_package(package), "executorch")
    with pytest.raises(InputError, match='"executorch" supports only float32 on cpu, not bfloat16 on cpu'):
        open_engine(package, "executorch", compute_dtype="bfloat16")


def test_int8_activations_are_an_engine_of_their_own(tmp_path: Path) -> None:
    int4 = tiny_package(tmp_path, "llama", Scheme.INT4).package
    info = open_engine(int4, "light-int8").info()
    assert (info["name"], info["compute_dtype"]) == ("light-int8", "int8-activations")
    assert open_engine(int4).info()["name"] == "light"


def test_without_torch_an_unknown_model_is_refused_with_the_extra(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "permille.engines.torch_engine", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    package.config["hidden_act"] = "gelu_fast"
    with pytest.raises(InputError, match=r"pip install 'permille\[torch\]'"):
        open_engine(package)


def test_interface_factory_and_export_import_no_torch() -> None:
    code = (
        "import sys, permille.engines.interface, permille.engines.factory, permille.engines.export;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
