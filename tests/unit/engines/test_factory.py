"""Opening an engine by name, without torch until then."""

import subprocess
import sys
from pathlib import Path

import pytest

from permille.engines.factory import open_engine
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from tests.unit.package.tiny import write_tiny


@pytest.fixture
def package(tmp_path: Path) -> Package:
    blobs = BlobFolder(tmp_path)
    return Package.open(blobs, write_tiny(blobs).digest)


def test_the_torch_engine_opens_by_name(package: Package) -> None:
    engine = open_engine(package, "torch", compute_dtype="float32")
    assert engine.k == package.k
    assert engine.info()["name"] == "torch"


def test_an_unknown_engine_is_refused_with_the_list(package: Package) -> None:
    with pytest.raises(InputError, match=r"expected an engine of torch; got 'abacus'"):
        open_engine(package, "abacus")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_extra_is_named(package: Package, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith("permille.engines.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf'needs {missing}, .*pip install "permille\[torch\]"'):
        open_engine(package)


def test_interface_factory_and_export_import_no_torch() -> None:
    code = (
        "import sys, permille.engines.interface, permille.engines.factory, permille.engines.export;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
