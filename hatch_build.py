"""Compile the native kernels during the build of a wheel or an editable installation.

Without a C compiler, the build still succeeds. The wheel is then pure Python and computes with numpy.

A release (`scripts/release.py`) sets `PERMILLE_WHEEL` to `any`, for a pure wheel, or to a machine, such as
`aarch64`, for a wheel with kernels that `CC` compiles for it.
"""

import os
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """A build hook that adds the compiled kernels, the tag of the platform, and the public text."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the kernels, beside their sources if editable, else into the archive of the wheel."""
        text = Path(self.root) / "examples" / "corpus.jsonl.gz"
        if version != "editable" and text.exists():  # for `permille personalise`; container images lack it
            build_data["force_include"][str(text)] = f"permille/corpora/{text.name}"
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        released = os.environ.get("PERMILLE_WHEEL")
        if released == "any":
            return
        room = Path(self.root) / "permille" / "native"
        build = runpy.run_path(str(room / "build.py"))
        name = build["LIBRARY_NAME"]
        if version == "editable":
            library = room / name
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="permille-wheel-")
            library = Path(self._folder.name) / name
        try:
            targets = build["build"](library, machine=released)
        except build["BuildError"] as exc:
            if released:
                raise
            self.app.display_warning(f"permille: no native kernels, numpy does their work: {exc}")
            return
        self.app.display_info(f"permille: native kernels for {' '.join(targets)}")
        # The kernels need no function of glibc that is newer than 2.17. `auditwheel` checks it for a release.
        platform = f"manylinux_2_17_{released}" if released else sysconfig.get_platform()
        platform = platform.replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"permille/native/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Delete the temporary folder, since the archive contains the library now."""
        if self._folder is not None:
            self._folder.cleanup()
