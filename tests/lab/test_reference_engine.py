"""The reference engine in the conformance suite. It must be correct, because others are compared with it."""

from pathlib import Path

import pytest

from permille.choices import AdapterKind
from permille.package.build import ChosenAdapter
from permille_lab.measuring.reference_engine import ReferenceEngine
from tests.unit.engines.conformance import Conformance
from tests.unit.engines.tiny import CONFIGS, tiny_package


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_the_reference_conforms(family: str, tmp_path: Path) -> None:
    tiny = tiny_package(tmp_path, family)
    Conformance(engine=ReferenceEngine(tiny.package), tiny=tiny).check()


def test_the_reference_conforms_with_adapters(tmp_path: Path) -> None:
    for family, kind in (("llama", AdapterKind.LORA), ("gpt_neox", AdapterKind.LORA_FA)):
        adapter = ChosenAdapter(kind=kind, rank=4, alpha=8, scope="layers:1")
        tiny = tiny_package(tmp_path / family, family, adapter=adapter)
        Conformance(engine=ReferenceEngine(tiny.package), tiny=tiny).check()
