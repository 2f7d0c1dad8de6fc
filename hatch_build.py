"""Compile the native kernels while a wheel or an editable installation is made.

Without a C compiler the installation still succeeds: the wheel is then pure, and numpy does the work.
"""

import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds `permille/native/_kernels.so`, the platform's tag and the public text to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Editable installations get the library beside its sources, wheels in the archive."""
        text = Path(self.root) / "examples" / "corpus.jsonl.gz"
        if version != "editable" and text.exists():  # for `permille personalise`; images go without it
            build_data["force_include"][str(text)] = f"permille_service/personal/{text.name}"
        room = Path(self.root) / "permille" / "native"
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        build = runpy.run_path(str(room / "build.py"))
        name = build["LIBRARY_NAME"]
        if version == "editable":
            library = room / name
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="permille-wheel-")
            library = Path(self._folder.name) / name
        try:
            targets = build["build"](library)
        except build["BuildError"] as exc:
            self.app.display_warning(f"permille: no native kernels, numpy does their work: {exc}")
            return
        self.app.display_info(f"permille: native kernels for {' '.join(targets)}")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"permille/native/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """The archive holds the library now."""
        if self._folder is not None:
            self._folder.cleanup()
