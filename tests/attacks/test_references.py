"""Forged reference rows of a package that would crash, mislead or exhaust a training are refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from permille.digests import canonical_json, parse_canonical
from permille.errors import PackageError
from permille.package.build import write_manifest
from permille.package.limits import MAX_MANIFEST_BYTES, Role
from permille.package.reader import Package, verify_package
from permille.package.reference_rows import ReferenceRows, write_reference
from permille.training.reference import make_reference
from tests.unit.engines.tiny import VOCABULARY, tiny_package

pytestmark = pytest.mark.attack(13, "forges the reference of a package")

Forge = Callable[[ReferenceRows], Mapping[str, Any]]
ATTACKS: list[tuple[str, Forge]] = [
    ("reference", lambda rows: {"ids_NT": rows.ids_NT + VOCABULARY}),
    ("reference", lambda rows: {"ids_NT": rows.ids_NT[:1]}),
    # Another byte string of the same rows.
    ("reference", lambda rows: {"ids_NT": np.pad(rows.ids_NT, ((0, 0), (0, 1)), constant_values=1)}),
    ("reference", lambda rows: {"named_RS": rows.named_RS * 0}),
    ("reference", lambda rows: {"named_RS": rows.named_RS + VOCABULARY}),
    ("reference", lambda rows: {"named_RS": rows.named_RS[1:]}),
    ("reference", lambda rows: {"named_RS": rows.named_RS[:, 1:]}),
    ("reference", lambda rows: {"probability_RS": rows.probability_RS + 1}),
    ("reference", lambda rows: {"probability_RS": rows.probability_RS * np.float32(np.nan)}),
    ("reference", lambda rows: {"probability_RS": -1 - rows.probability_RS}),
    ("reference", lambda rows: {"begin_N": rows.begin_N * 0}),
    ("reference", lambda rows: {"end_N": rows.end_N + 1000}),
    ("reference", lambda rows: {"end_N": rows.begin_N}),
    ("reference", lambda rows: {"pulls_N": rows.pulls_N | True}),
    ("reference", lambda rows: {"pulls_N": rows.pulls_N & False}),
    # More rows than a device should read at each strength.
    (
        "reference",
        lambda rows: {
            "ids_NT": np.tile(rows.ids_NT, (150, 1)),
            "begin_N": np.tile(rows.begin_N, 150),
            "end_N": np.full(150 * len(rows.end_N), rows.ids_NT.shape[1]),
            "chat_N": np.tile(rows.chat_N, 150),
            "pulls_N": np.arange(150 * len(rows.end_N)) == 0,
            "named_RS": rows.named_RS[: rows.ids_NT.shape[1] - 1],
            "probability_RS": rows.probability_RS[: rows.ids_NT.shape[1] - 1],
        },
    ),
    # Rows that are longer than the model's context.
    (
        "reference",
        lambda rows: {
            "ids_NT": np.pad(rows.ids_NT, ((0, 0), (0, 500))),
            "end_N": np.where(rows.pulls_N, rows.end_N, 500),
        },
    ),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Package:
    package = tiny_package(tmp_path_factory.mktemp("blobs"), "llama").package
    text_NT = np.random.default_rng(0).integers(0, VOCABULARY, (6, 20))
    manifest = make_reference(package, text_NT=text_NT, chat=None, made={})
    return verify_package(package.blobs, write_manifest(package.blobs, manifest))


@pytest.mark.parametrize(("code", "forge"), ATTACKS)
def test_a_forged_reference_is_refused(good: Package, code: str, forge: Forge) -> None:
    rows = good.reference_rows()
    assert rows is not None
    layer = write_reference(good.blobs, replace(rows, **forge(rows)))
    document: Any = parse_canonical(good.manifest.to_bytes(), MAX_MANIFEST_BYTES)
    entry = next(entry for entry in document["layers"] if entry["role"] == Role.REFERENCE)
    entry |= {"digest": layer.digest, "size_bytes": layer.size_bytes}
    with pytest.raises(PackageError, match=f"^{code}:"):
        verify_package(good.blobs, good.blobs.put_bytes(canonical_json(document)))
