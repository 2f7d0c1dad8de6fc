"""The API process is light: no torch, not even through the library."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "bitsandbytes", "datasets", "matplotlib", "celery", "pandas", "scipy")


def test_app_is_imported_without_the_heavy_libraries() -> None:
    code = "import sys, service.app, service.__main__, service.cli.main; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fastapi" in loaded
    assert loaded.isdisjoint(HEAVY)
