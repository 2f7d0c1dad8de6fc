"""Tests of packages: an exact round trip, and digests that change only with the inputs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.choices import AdapterKind, Embeddings
from permille.errors import InputError, PackageError
from permille.models.families import expected_tensors, scoped_tensors
from permille.package import layers
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter, write_manifest
from permille.package.config_files import clean_config
from permille.package.limits import BLOCK_BYTES, BLOCK_HASH_BYTES, BLOCKED_ROLES, Role
from permille.package.manifest import Layer, Manifest, Quantization, decimal_text
from permille.package.reader import Package, verify_package
from permille.package.safetensors_io import SafetensorsWriter
from permille.quantization import default_group_size, dequantize, quantize
from permille.quantization.gguf_blocks import TYPES, blocks_of, type_name
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import RawTensor
from tests.unit.package.tiny import LLAMA, WIDE, as_dtype, kept, write_tiny

ODD = LLAMA | {"hidden_size": 9, "intermediate_size": 7, "num_attention_heads": 1, "num_key_value_heads": 1}

NOT_MADE_HERE = (Role.ADAPTER, Role.REFERENCE, Role.PROGRAM, Role.FILE)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path)


@pytest.mark.parametrize("scheme", [each for each in Scheme if each is not Scheme.SOURCE])
@pytest.mark.parametrize(("dtype", "config"), [("F32", LLAMA), ("BF16", LLAMA), ("F16", ODD)])
def test_everything_comes_back_bit_for_bit(
    blobs: BlobFolder, scheme: Scheme, dtype: str, config: dict[str, object]
) -> None:
    tiny = write_tiny(blobs, scheme=scheme, dtype=dtype, config=config)
    package = Package.open(blobs, tiny.digest)
    assert package.size_bytes == sum(blob.size_bytes for blob in blobs.entries())
    scoped = [name for name, _ in scoped_tensors(config)]
    flat = []
    for name in scoped:
        weight = tiny.weights[name].float32()
        expected = quantize(weight, scheme, default_group_size(scheme))
        found = package.quantized(name)
        assert isinstance(found, QuantizedTensor)
        assert np.array_equal(found.packed, expected.packed) and np.array_equal(found.scales, expected.scales)
        assert np.array_equal(dequantize(found), dequantize(expected))
        assert np.array_equal(package.mask(name), tiny.mask[name])
        flat.append(weight.reshape(-1)[tiny.mask[name]])
    assert np.array_equal(package.values(), np.concatenate(flat))
    assert set(package.plain_names) == expected_tensors(config).keys() - set(scoped)
    for name in package.plain_names:
        plain, source = package.plain(name), tiny.weights[name]
        assert (plain.dtype, plain.shape) == (source.dtype, source.shape)
        assert plain.data.tobytes() == source.data.tobytes()
    assert package.config == clean_config(config)
    assert (package.k, package.counts) == (5 * len(scoped), (5,) * len(scoped))
    assert package.file("LICENSE").startswith(b"Anybody")


def test_codes_of_a_file_come_back_bit_for_bit(blobs: BlobFolder) -> None:
    tiny = write_tiny(blobs, config=WIDE, scheme=Scheme.SOURCE)
    package = verify_package(blobs, tiny.digest)
    for number, info in enumerate(package.manifest.tensors):
        name = TYPES[number % len(TYPES)]
        expected = kept(tiny.weights[info.name].float32(), name)
        found = package.quantized(info.name)
        assert isinstance(found, QuantizedTensor)
        assert type_name(found) == name
        assert np.array_equal(blocks_of(found), blocks_of(expected))
        assert np.array_equal(dequantize(found), dequantize(expected))


def test_the_same_inputs_give_the_same_digest_anywhere(tmp_path: Path) -> None:
    first, second = (write_tiny(BlobFolder(tmp_path / name)) for name in "ab")
    assert first.digest == second.digest
    assert write_tiny(first.blobs, seed=1).digest != first.digest


def test_what_open_returns_cannot_be_written_but_values_are_a_copy(blobs: BlobFolder) -> None:
    package = Package.open(blobs, write_tiny(blobs).digest)
    name = package.manifest.tensors[0].name
    coded = package.quantized(name)
    views = (coded.packed, coded.scales, package.mask(name))
    assert not any(view.flags.writeable for view in views)
    package.values()[:] = 0
    assert np.any(package.values())


def overwrite_last(blobs: BlobFolder, digest: str, byte: bytes) -> None:
    path = blobs.path(digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + byte)


def test_a_flipped_bit_of_a_big_layer_is_found_before_its_first_tensor(blobs: BlobFolder) -> None:
    tiny = write_tiny(blobs, config=LLAMA | {"vocab_size": 9000})
    overwrite_last(blobs, tiny.manifest.layer(Role.PLAIN).digest, b"\0")
    package = Package.open(blobs, tiny.digest)
    for _ in range(2):
        with pytest.raises(PackageError, match=r"block-digest: .* bytes \d+ to \d+ of plain"):
            package.quantized(package.manifest.tensors[0].name)
    with pytest.raises(PackageError, match="blob-digest"):
        verify_package(blobs, tiny.digest)


def test_a_tensor_outside_of_the_scope_has_an_empty_mask(blobs: BlobFolder) -> None:
    order = ["a", "b"]
    layer = layers.write_mask(blobs, {"b": np.array([3, 9], np.uint32)}, order)
    same = layers.write_mask(blobs, {"a": np.empty(0, np.uint32), "b": np.array([3, 9], np.uint32)}, order)
    assert layer == same


def test_writers_refuse_what_a_reader_would(blobs: BlobFolder) -> None:
    weight = as_dtype("a", np.zeros((2, 2), np.float32), "F32")
    nan = as_dtype("a", np.full(2, np.nan, np.float32), "F32")
    falling = np.array([2, 1], np.uint32)
    int4 = quantize(weight.float32(), Scheme.INT4, 32)
    refused: tuple[Callable[[], object], ...] = (
        lambda: layers.write_mask(blobs, {"a": falling}, ["a"]),
        lambda: layers.write_mask(blobs, {"c": falling[:1]}, ["a"]),
        lambda: layers.write_mask(blobs, {"a": np.array([1], np.int64)}, ["a"]),
        lambda: layers.write_values(blobs, [weight], ["a"]),
        lambda: layers.write_values(blobs, [], ["a"]),
        lambda: layers.write_values(blobs, [nan], ["b"]),
        lambda: layers.write_values(blobs, [nan], ["a"]),
        lambda: layers.write_plain(blobs, [nan]),
        lambda: layers.write_dense(blobs, [("a", int4)], Quantization(name=Scheme.NF4, group_size=64)),
        lambda: layers.write_file(blobs, "modeling.py", b""),
    )
    for write in refused:
        with pytest.raises(InputError):
            write()
    with pytest.raises(PackageError, match="config-key"):
        layers.write_file(blobs, "tokenizer_config.json", b'{"auto_map": {}}')
    assert list(blobs.entries()) == []


def test_a_manifest_is_not_written_for_a_package_that_would_not_open(blobs: BlobFolder) -> None:
    tiny = write_tiny(blobs)
    blobs.delete(tiny.manifest.layer(Role.PLAIN).digest)
    blobs.delete(tiny.digest)
    with pytest.raises(PackageError, match="blob-missing"):
        write_manifest(blobs, tiny.manifest)
    assert not blobs.has(tiny.digest)


def test_layers_are_streamed(blobs: BlobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer stores each tensor before it asks for the next one."""
    held, most = 0, 0
    honest: Callable[..., None] = SafetensorsWriter.add

    def add(self: SafetensorsWriter, *args: Any) -> None:
        nonlocal held
        honest(self, *args)
        held -= 1

    monkeypatch.setattr(SafetensorsWriter, "add", add)

    def tensors() -> Iterator[RawTensor]:
        nonlocal held, most
        for number in range(5):
            held += 1
            most = max(most, held)
            yield as_dtype(f"t{number}", np.zeros(3, np.float32), "F32")

    layers.write_plain(blobs, tensors())
    assert (held, most) == (0, 1)


@pytest.mark.parametrize("kind", list(AdapterKind))
def test_an_adapter_is_a_then_zeros_and_stands_in_the_place_of_a_mask(
    blobs: BlobFolder, kind: AdapterKind
) -> None:
    chosen = ChosenAdapter(kind=kind, rank=4, alpha=8, scope="mlp", seed=3)
    tiny = write_tiny(blobs, adapter=chosen)
    package = verify_package(blobs, tiny.digest)
    assert Manifest.from_bytes(tiny.manifest.to_bytes()) == tiny.manifest == package.manifest
    with_a = kind is AdapterKind.LORA
    expected = [
        4 * (rows + with_a * columns) if ".mlp." in name else 0
        for name, (rows, columns) in scoped_tensors(LLAMA)
    ]
    assert list(package.counts) == expected
    parts = np.split(package.values(), np.cumsum(expected)[:-1])
    for tensor, part in zip(tiny.manifest.tensors, parts, strict=True):
        if tensor.count:
            a_RK, columns = package.adapter_matrix(tensor.name), tensor.shape[1]
            assert 0.7 < a_RK.std() * np.sqrt(columns) < 1.3 and np.unique(a_RK).size > 90
            frozen = part[: 4 * columns * with_a], part[4 * columns * with_a :]
            assert np.array_equal(frozen[0], a_RK.reshape(-1)[: frozen[0].size]) and not frozen[1].any()
    again, other = write_tiny(blobs, adapter=chosen), write_tiny(blobs, adapter=replace(chosen, seed=4))
    assert again.digest == tiny.digest and other.manifest.mask_digest != package.mask_digest
    with pytest.raises(InputError, match=f"no mask, but an adapter .{kind} of rank"):
        package.mask(tiny.manifest.tensors[0].name)


def test_an_adapter_larger_than_the_weights_beside_it_is_refused(blobs: BlobFolder) -> None:
    with pytest.raises(InputError, match="Choose a lower rank"):
        write_tiny(blobs, adapter=ChosenAdapter(kind=AdapterKind.LORA, rank=16, alpha=16))


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.001, "0.001"), (1e-05, "0.00001"), (0.5, "0.5"), (1.0, "1.0"), (1e-07, "0.0000001")],
)
def test_density_is_written_without_exponent(number: float, text: str) -> None:
    assert decimal_text(number) == text
    for no_number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            decimal_text(no_number)


def test_cleaning_drops_what_is_not_a_setting() -> None:
    config = LLAMA | {"_name_or_path": "/home/me/model", "attn_implementation": "x/y", "id2label": {"0": "A"}}
    assert clean_config(config) == LLAMA
    assert clean_config(LLAMA | {"auto_map": {"AutoModel": "x.Y"}}) == LLAMA


def test_a_float32_program_of_a_tied_table_in_8_bits_has_room(blobs: BlobFolder) -> None:
    """The numbers are of SmolLM2's size.

    32 numbers take 34 bytes in the package, and 8 bytes each in the program.
    """
    manifest = Package.open(blobs, write_tiny(blobs, embeddings=Embeddings.Q8_0).digest).manifest
    numbers, blocks = 49152 * 576, 0
    sizes = {Role.PLAIN: numbers * 34 // 32}
    for role in BLOCKED_ROLES:
        blocks += -(-sizes.get(role, manifest.layer(role).size_bytes) // BLOCK_BYTES)
    sizes[Role.BLOCKS] = BLOCK_HASH_BYTES * blocks
    wide = replace(
        manifest,
        layers=tuple(
            replace(layer, size_bytes=sizes.get(layer.role, layer.size_bytes)) for layer in manifest.layers
        ),
    )
    program = Layer(role=Role.PROGRAM, digest=manifest.digest, size_bytes=8 * numbers + (1 << 20))
    assert wide.with_program(program, {"weights": "float32"}).has_layer(Role.PROGRAM)
    with pytest.raises(PackageError, match="layer-size"):
        wide.with_program(replace(program, size_bytes=12 * numbers), {"weights": "float32"})
