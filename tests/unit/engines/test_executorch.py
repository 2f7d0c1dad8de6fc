"""Tests of ExecuTorch's runtime against the reference. `make test-executorch` runs them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from permille.choices import EstimatorKind
from permille.engines.executorch.build import LIBRARY, build
from permille.engines.executorch.engine import ExecutorchEngine
from permille.engines.executorch.exporting import export_executorch
from permille.engines.executorch.program import ProgramShape
from permille.engines.light.engine import LightEngine
from permille.engines.sampling import TokenSampling
from permille.errors import InputError, PackageError
from permille.package.build import write_manifest
from permille.package.limits import Role
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille.zo.estimators import Batch
from permille.zo.lattice import state_digest
from permille.zo.log import decode_canonical
from permille.zo.replay import replay
from permille_agent.link.install import try_package
from permille_agent.state.home import open_home
from permille_agent.state.models import InstalledRelease, record_installed
from permille_agent.training.engines import EngineChoice
from permille_agent.training.outcome import RunResult
from permille_lab.measuring.decoded_model import load_decoded_model
from tests import packages
from tests.unit.edge_agent.runs import train_quickly, user_text
from tests.unit.engines.conformance import LOSS_RULES, Conformance
from tests.unit.engines.tiny import Tiny, tiny_batch, tiny_package, variants

pytestmark = pytest.mark.executorch

# The suite's 5 variants of 3 rows exceed one pass of this shape, and do not fill whole passes.
SHAPE = ProgramShape(variants=4, rows=7, tokens=20)
# For 8-bit activations and bfloat16 scales, on a model with losses of about 5.
INT8_TOLERANCE = 0.05

RUN_ALONE = """
import sys
from pathlib import Path
import numpy as np
from permille.engines.executorch.engine import ExecutorchEngine
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.estimators import Batch
package = Package.open(BlobFolder(Path(sys.argv[1])), sys.argv[2])
engine = ExecutorchEngine(package, threads=1)
ids = np.arange(12)[None]
batch = Batch(input_ids_BT=ids, attention_BT=ids >= 0, target_BT=ids > 0)
print(float(engine.losses(package.values()[None], batch)[0]), "torch" in sys.modules)
"""


# Source of a process that uses the unmodified runtime of the wheel.
RUN_MERGED = """
import sys
import numpy as np, torch
from executorch.runtime import Runtime
forward = Runtime.get().load_program(sys.argv[1]).load_method("forward")
for tokens in (20, 3):
    print(float(forward.execute([torch.arange(tokens)[None]])[0][0, -1].max()))
"""


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return build(LIBRARY)


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    tiny = tiny_package(tmp_path_factory.mktemp("blobs"), "llama", Scheme.NF4)
    return replace(tiny, package=_exported(tiny.package))


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    tiny = tiny_package(tmp_path_factory.mktemp("blobs"), "llama", Scheme.INT4)
    return replace(tiny, package=_exported(tiny.package, weights="int4"))


def _exported(package: Package, shape: ProgramShape = SHAPE, weights: str = "float32") -> Package:
    from permille.engines.executorch.exporting import export_program

    layer = export_program(package, shape, weights=weights)
    manifest = package.manifest.with_program(layer, {"weights": weights})
    return Package.open(package.blobs, write_manifest(package.blobs, manifest))


@pytest.mark.parametrize("rule", LOSS_RULES, ids=lambda rule: rule.__name__)
def test_float32_passes_the_suite(rule: object, float32: Tiny) -> None:
    engine = ExecutorchEngine(float32.package, threads=2)
    assert engine.info()["compute_dtype"] == "float32"
    rule(Conformance(engine=engine, tiny=float32))  # type: ignore[operator]


@pytest.mark.parametrize("rule", LOSS_RULES, ids=lambda rule: rule.__name__)
def test_int4_weights_and_int8_activations_pass_the_suite(rule: object, int4: Tiny) -> None:
    engine = ExecutorchEngine(int4.package, threads=2)
    assert engine.info()["compute_dtype"] == "int8-activations"
    rule(Conformance(engine=engine, tiny=int4, loss_tolerance=INT8_TOLERANCE))  # type: ignore[operator]


def test_the_runtime_alone_gives_the_losses_of_the_light_engine(float32: Tiny) -> None:
    """The runtime's process never imports torch."""
    package = float32.package
    command = [sys.executable, "-c", RUN_ALONE, str(package.blobs.root), package.digest]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loss, torch_is_there = done.stdout.split()
    assert (torch_is_there, done.stderr) == ("False", "")
    ids = np.arange(12)[None]
    batch = Batch(input_ids_BT=ids, attention_BT=ids >= 0, target_BT=ids > 0)
    expected = LightEngine(package, threads=1).losses(package.values()[None], batch)[0]
    assert abs(float(loss) - expected) < 1e-5


def test_differences_along_directions_are_those_of_the_light_engine(int4: Tiny) -> None:
    """With 8-bit activations, the error of the differences is less than half of their norm."""
    package, batch = int4.package, tiny_batch(lengths=(20,) * 6)
    values_VK = variants(package, 9, scale=0.1)[1:]
    exact = LightEngine(package, threads=1).losses(values_VK, batch)
    coarse = ExecutorchEngine(package, threads=1).losses(values_VK, batch)
    exact_C, coarse_C = exact - exact.mean(), coarse - coarse.mean()
    assert np.linalg.norm(coarse_C - exact_C) < 0.5 * np.linalg.norm(exact_C)


def test_what_is_not_ours_is_refused(float32: Tiny, int4: Tiny) -> None:
    layer = int4.package.manifest.layer(Role.PROGRAM)
    float32.package.blobs.put_file(int4.package.program() or Path())
    manifest = float32.package.manifest.with_program(layer, {})
    with pytest.raises(PackageError, match=r"program-binding: The program belongs to package "):
        ExecutorchEngine(Package(float32.package.blobs, manifest))
    with pytest.raises(InputError, match="no program of ExecuTorch: error"):
        ExecutorchEngine(packages.program_package(float32.package))
    engine = ExecutorchEngine(float32.package)
    values_K, long = float32.package.values(), tiny_batch(lengths=(21,))
    with pytest.raises(InputError, match="has 21 tokens, and the model takes at most 20"):
        engine.losses(values_K[None], long)
    with pytest.raises(InputError, match=r'"executorch" writes no text'):
        engine.generate(values_K, np.array([1]), TokenSampling(max_new_tokens=1))


def test_a_device_tries_a_program_in_a_child_before_it_installs_the_package(tmp_path: Path) -> None:
    """If the runtime refuses a program, crashes or computes wrong losses, only the trial fails."""
    package = packages.tiny_package(tmp_path, scheme=Scheme.INT4)
    good = _exported(package, ProgramShape(variants=2, rows=2, tokens=16), "int4")
    try_package(tmp_path, good.digest, size_bytes=good.size_bytes)
    data = bytearray((good.program() or Path()).read_bytes())
    half = len(data) // 2
    for wrong in (data[:64] + bytes(half - 64) + data[half:], data[:half] + bytes(len(data) - half)):
        bad = packages.program_package(package, bytes(wrong))
        with pytest.raises(PackageError, match=r"package-trial|program-binding"):
            try_package(tmp_path, bad.digest, size_bytes=bad.size_bytes)


def test_a_merged_model_runs_in_an_unmodified_runtime(float32: Tiny, tmp_path: Path) -> None:
    """The personal values are constants, no custom operator is left, and the number of tokens is free."""
    package = float32.package
    values_K = package.values() + np.float32(0.25)
    assert export_executorch(package, values_K, tmp_path / "mine") > 1000
    command = [sys.executable, "-W", "ignore", "-c", RUN_MERGED, str(tmp_path / "mine/model.pte")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    model = load_decoded_model(package)
    parts = torch.split(torch.from_numpy(values_K), list(package.counts))
    replaced = dict(zip(model.value_names, parts, strict=True))
    for tokens, found in zip((20, 3), done.stdout.split(), strict=True):
        inputs = (torch.arange(tokens)[None],)
        logits = functional_call(model.module, replaced, inputs, {"use_cache": False}).logits
        assert abs(float(found) - float(logits[0, -1].max())) < 1e-4


def _gain(run: RunResult) -> float:
    decision = run.decision
    assert decision is not None and decision.loss_base is not None and decision.loss_personal is not None
    return decision.loss_base - decision.loss_personal


def test_a_training_learns_what_the_light_engine_does_and_its_log_replays(tmp_path: Path) -> None:
    """Text, seed and directions are the same. The improvements agree within a fifth."""
    found: dict[str, RunResult] = {}
    for name in ("light", "executorch"):
        home = open_home(tmp_path / name)
        package = packages.tiny_package(home.blobs, scheme=Scheme.INT4)
        if name == "executorch":
            package = _exported(package, ProgramShape(variants=8, rows=16, tokens=32))
        record_installed(home, InstalledRelease(name="tiny", version=1, manifest_digest=package.digest))
        found[name] = train_quickly(
            home,
            [user_text(tmp_path)],
            estimator=EstimatorKind.SPSA,
            steps=60,
            share_log=True,
            engine_of=EngineChoice(name=name, threads=1),
        )
        used = found[name].engine
        assert used is not None and used.name == name
    result, gained = found["executorch"], [_gain(run) for run in found.values()]
    assert gained[0] > 0
    assert abs(gained[1] - gained[0]) < 0.2 * gained[0]
    data = (home.runs / str(result.run) / "shared.log").read_bytes()
    log = decode_canonical(data, max_bytes=1 << 20, max_steps=1000)
    s_K, exponent = replay(log.header, log.coefficients_TQ), log.header.step_unit_exponent
    digest = state_digest(s_K, mask_digest=package.mask_digest, step_unit_exponent=exponent)
    assert result.metrics is not None and result.metrics.state_digest == digest
