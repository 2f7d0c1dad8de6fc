"""An optional step: learn directions for zeroth order from public text, and add them to a package.

package = with_basis(package, drawn, work=Path("work"))
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from permille.corpora.sequences import Tokenizer
from permille.digests import JSON
from permille.engines.light.engine import LightEngine
from permille.errors import InputError
from permille.models.settings import within_positions
from permille.package.basis import write_basis
from permille.package.build import write_manifest
from permille.package.reader import Package, verify_package
from permille.pipeline.draw import Corpus, Drawn, Sampling
from permille.pipeline.inputs import Progress, part, silent
from permille.training.basis import LEAST_ROWS, learn_basis

MOST_ROWS, _TOKENS, _SEED = 1024, 128, 2 << 32


def basis_sampling(config: Mapping[str, Any]) -> Sampling:
    """Return the number, length and seed of the rows to draw for a basis. Each call returns the same seed."""
    return Sampling(number=MOST_ROWS, length=within_positions(config, _TOKENS), seed=_SEED)


def draw_basis_text(
    corpus: Corpus, tokenizer: Tokenizer, config: Mapping[str, Any], *, most: int = MOST_ROWS
) -> Drawn:
    """Draw the rows for a basis from a corpus.

    Args:
        most: the number of rows if there is enough text. A check of the corpus needs only `LEAST_ROWS`.

    Raises:
        InputError: the corpus has fewer than `LEAST_ROWS` rows, or is damaged.
        RetryableError: the data set cannot be reached.
    """
    wanted = replace(basis_sampling(config), number=most)
    try:
        return corpus.draw_held_out(tokenizer, wanted, least=LEAST_ROWS)[0]
    except InputError as exc:
        raise InputError(f"A basis needs {LEAST_ROWS} rows of public text or more. {exc}") from exc


def with_basis(
    package: Package,
    text: Drawn,
    *,
    threads: int | None = None,
    work: Path | None = None,
    progress: Progress = silent,
) -> Package:
    """Learn a basis, write the package with it, and verify the package as a device does.

    Args:
        package: a package that the light engine can compute.
        text: rows of public text.
        threads: the number of threads. None uses all cores.
        work: a folder with which another call continues. None keeps nothing.

    Raises:
        InputError: there is too little text, or the light engine cannot compute the package.
    """
    told = part(progress, 0.0, 0.9, "pseudo-user")
    engine = LightEngine(package, threads=threads)
    basis = learn_basis(engine, package, text.tokens_NT, work=work, progress=told)
    made: dict[str, JSON] = {"corpus": text.provenance}
    manifest = package.manifest.with_part(write_basis(package.blobs, basis), made)
    progress(0.9, "verifying")
    return verify_package(package.blobs, write_manifest(package.blobs, manifest))
