"""Library and agent do not need Linux alone: what other systems lack is hidden here from our own modules.

Each test runs in a process of its own. Other libraries have versions for other systems, so they still find
everything.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = """
import builtins, importlib, os, pkgutil, select, signal, sys

REAL = builtins.__import__
NO_MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog"}
NO_CALLS = {os: ("fchmod", "getuid", "fork", "pread", "pwrite", "sched_getaffinity", "O_DIRECTORY"),
            select: ("poll",), signal: ("SIGVTALRM", "SIGALRM", "setitimer", "SIGKILL")}


def hidden_import(name, globals=None, locals=None, fromlist=(), level=0):
    if name in NO_MODULES and str((globals or {}).get("__name__")).startswith("permille"):
        raise ModuleNotFoundError(name, name=name)
    return REAL(name, globals, locals, fromlist, level)


def hide():
    builtins.__import__ = hidden_import


def remove():
    for module, names in NO_CALLS.items():
        for name in names:
            delattr(module, name)
"""


def run(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


IMPORT_ALL = """
hide()
names = []
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    for found in pkgutil.walk_packages(package.__path__, f"{root}."):
        # Programs and libraries in C are no modules. The store is the service's, which needs Linux or macOS.
        is_module = not found.name.endswith(("__main__", "._kernels", "._runtime"))
        if is_module and not found.name.startswith("permille.store"):
            importlib.import_module(found.name)
            names.append(found.name)
print(len(names))
"""


@pytest.mark.parametrize(
    "root", ["permille", "permille_agent", "permille_personal", "permille_rounds.keeper"]
)
def test_every_module_can_be_imported(root: str) -> None:
    assert int(run(IMPORT_ALL, root)) > 2


PURE_PATHS = """
from pathlib import Path
import numpy as np
from tests.packages import sentences, tiny_package
from permille.choices import EstimatorKind
from permille.engines.light.engine import LightEngine
from permille.errors import OperatorError
from permille.files import write_atomic
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.estimators import Batch, directions_of
from permille.zo.header import LogHeader, Schedule
from permille.zo.lattice import perturbed_pairs
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.replay import replay
from permille.zo.steps import apply_record, rounded_step
from permille_agent.state.home import open_home

hide()
remove()
folder = Path(sys.argv[1])
home = open_home(folder / "home")
write_atomic(home.root / "file", b"data", mode=0o600)
package = Package.open(BlobFolder(home.blobs), tiny_package(home.blobs).digest)
ids_BT = np.arange(16)[None]
batch = Batch(input_ids_BT=ids_BT, attention_BT=ids_BT >= 0, target_BT=ids_BT > 0)
engine, w_K, s_K, records = LightEngine(package), package.values(), np.zeros(package.k, np.int64), []
header = LogHeader(
    package_digest=package.digest, mask_digest=package.mask_digest, counts=package.counts, seed=7,
    estimator=EstimatorKind.SPSA, queries=2, epsilon=1e-2, learning_rate=1e-2, schedule=Schedule.LINEAR,
    total_steps=3, step_unit_exponent=-12,
)
for step in range(3):
    losses_V = engine.losses(perturbed_pairs(w_K, s_K, -12, directions_of(header, step), 1e-2), batch)
    grads_Q = (losses_V[0::2].astype(np.float64) - losses_V[1::2]) / 2e-2
    records.append(rounded_step(float(losses_V.mean()), grads_Q, header, step, normalised=True))
    apply_record(s_K, records[-1], header)
log = decode_canonical(encode_canonical(header, records), max_bytes=1 << 20, max_steps=3)
assert (replay(log.header, log.coefficients_TQ) == s_K).all() and s_K.any()

from permille.system import lock_file, peak_rss_bytes, user_id
with (home.root / "file").open("rb") as file:
    try:
        lock_file(file.fileno())
    except OperatorError as exc:
        print(exc)
assert user_id() is None
assert peak_rss_bytes() >= 0
"""


def test_a_package_is_built_trained_and_replayed(tmp_path: Path) -> None:
    assert run(PURE_PATHS, tmp_path).endswith(
        "This system cannot lock files (no fcntl). On Windows, use WSL.\n"
    )
