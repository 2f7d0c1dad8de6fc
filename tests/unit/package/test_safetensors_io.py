"""Tests of safetensors files: compatibility with the reference library in both directions, and full disks."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open

from permille.errors import InputError, PackageError
from permille.package.blobs import BlobFolder, BlobWriter
from permille.package.safetensors_io import SafetensorsFile, SafetensorsWriter
from permille.tensors import ITEM_BYTES, RawTensor

NUMPY = {"I64": "<i8", "F32": "<f4", "U32": "<u4", "F16": "<f2", "U8": "u1", "I8": "i1", "BF16": "<u2"}
TENSORS = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3)), max_size=8
)


def write(blobs: BlobFolder, tensors: list[tuple[str, list[int]]]) -> tuple[Path, dict[str, NDArray[Any]]]:
    rng = np.random.default_rng(0)
    arrays = {}
    with SafetensorsWriter(blobs) as writer:
        for number, (dtype, shape) in enumerate(tensors):
            array = rng.integers(0, 100, shape).astype(NUMPY[dtype])
            arrays[f"t{number}"] = array
            writer.add(f"t{number}", dtype, tuple(shape), array)
        digest, size = writer.finish()
    assert blobs.size(digest) == size
    return blobs.path(digest), arrays


@settings(max_examples=40, deadline=None)
@given(tensors=TENSORS)
def test_the_reference_library_reads_what_we_write_and_so_do_we(
    tensors: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, arrays = write(BlobFolder(tmp_path_factory.mktemp("b")), tensors)
    ours = SafetensorsFile(path)
    assert set(ours.names) == set(arrays)
    with safe_open(path, "pt") as theirs:
        assert set(theirs.keys()) == set(arrays)
        for name, array in arrays.items():
            mine = ours.tensor(name)
            assert (mine.shape, mine.data.tobytes()) == (array.shape, array.tobytes())
            assert theirs.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_every_tensor_is_aligned_to_its_item(tmp_path: Path) -> None:
    path, _ = write(
        BlobFolder(tmp_path), [("U8", [3]), ("F32", [5]), ("BF16", [1]), ("U8", [2]), ("I64", [1])]
    )
    file = SafetensorsFile(path)
    for name in file.names:
        tensor = file.tensor(name)
        assert tensor.data.ctypes.data % ITEM_BYTES[tensor.dtype] == 0
        assert not tensor.data.flags.writeable


def test_floats_widen_exactly(tmp_path: Path) -> None:
    numbers = torch.tensor([0.1, -3.0, 1e-30, 65504.0, 0.0])
    for dtype, kind in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        there = numbers.to(kind, copy=True)
        raw = RawTensor(name="w", dtype=dtype, shape=(5,), data=there.view(torch.uint8).numpy())
        assert raw.float32().tolist() == there.float().tolist()
        assert raw.all_finite()
        there[3] = float("nan")
        assert not raw.all_finite()
    with pytest.raises(InputError, match="got U8"):
        RawTensor(name="w", dtype="U8", shape=(1,), data=np.zeros(1, np.uint8)).float32()


def test_the_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with SafetensorsWriter(BlobFolder(tmp_path)) as writer:
        writer.add("a", "U8", (2,), np.zeros(2, np.uint8))
        for name, dtype, shape in (
            ("a", "U8", (2,)),
            ("b", "U9", (2,)),
            ("b", "U8", (3,)),
            ("b", "F32", (1,)),
        ):
            with pytest.raises(InputError):
                writer.add(name, dtype, shape, np.zeros(2, np.uint8))


def test_a_disk_that_fills_up_while_the_layer_is_assembled_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    honest = BlobWriter.write

    def fills_up(self: BlobWriter, data: bytes) -> int:
        nonlocal written
        written += len(data)
        if written > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(self, data)

    monkeypatch.setattr(BlobWriter, "write", fills_up)
    blobs = BlobFolder(tmp_path)
    with pytest.raises(OSError, match="No space left"), SafetensorsWriter(blobs) as writer:
        writer.add("a", "U8", (5000,), np.zeros(5000, np.uint8))
        writer.finish()
    assert written > 1000
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_dtype_that_is_not_allowed_here_is_refused(tmp_path: Path) -> None:
    path, _ = write(BlobFolder(tmp_path), [("I64", [1])])
    with pytest.raises(PackageError, match="header-dtype"):
        SafetensorsFile(path, dtypes=("U8", "F32"))
