"""Export of a package and sparse values to a folder with `model.gguf`, and a `Modelfile` for Ollama.

    exported = export_gguf(package, personal_K, Path("mine"), like=Path("model.gguf"))
    exported.kept     # the share of the personal change that the file keeps

With `like`, the file takes tokenizer and metadata from the GGUF file that the model came from. Without it,
both are translated from the files of the package.

Tensors are written one by one, so memory depends on the size of the largest tensor, not on that of the model.
The folder appears only when it is complete. A failed export leaves no folder.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize as dequantize_gguf
from numpy.typing import NDArray

from permille.choices import choice_of
from permille.engines.export import checked_values, new_folder
from permille.engines.gguf.blocks import (
    OWN_CODES,
    BlockType,
    encode,
    encode_source,
    fits,
    row_bytes,
)
from permille.engines.gguf.modelfile import modelfile
from permille.errors import InputError
from permille.files import write_atomic
from permille.models.families import expected_tensors, shape_of
from permille.models.gguf.config import ROPE_FACTORS
from permille.models.gguf.description import Description, describe
from permille.models.gguf.original import Original
from permille.models.gguf.vocabulary import PromptRules, vocabulary_of
from permille.package.manifest import TensorInfo
from permille.package.reader import Package
from permille.quantization import dequantize
from permille.quantization.gguf_blocks import type_name
from permille.quantization.types import QuantizedTensor, Scheme
from permille.tensors import Q8_0

GGUF_FILE, MODELFILE = "model.gguf", "Modelfile"
LEAST_KEPT = 0.95
"""An export that keeps less than this share of the personal change is refused."""
_TYPES = {
    BlockType.F32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    BlockType.F16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    BlockType.Q8_0: (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    BlockType.Q4_0: (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    BlockType.Q4_1: (GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufExport:
    """Result of an export.

    Attributes:
        kind: the type of the linear layers.
        size_bytes: the size of the file.
        kept: the share of the personal change that the file keeps. It is `1 - e / c`, where `e` is the
            squared error of the stored values, and `c` is their squared change from the values of the
            package. It is 1 if no value has changed.
        as_float16: the number of linear layers stored in float16, because blocks of 32 do not fill their
            rows.
    """

    kind: BlockType
    size_bytes: int
    kept: float
    as_float16: int


class ChangeLostError(InputError):
    """The type is too coarse for the personal change. `finer` is a type to try instead."""

    def __init__(self, message: str, finer: BlockType) -> None:
        super().__init__(message)
        self.finer = finer


def export_gguf(
    package: Package,
    values_K: NDArray[np.float32] | None,
    folder: Path,
    *,
    kind: BlockType | str | None = None,
    like: Path | None = None,
) -> GgufExport:
    """Write a folder that unmodified llama.cpp loads.

    Linear layers, embedding and head are stored in the type `kind`. With Q4_0, embedding and head are stored
    in Q8_0. All other tensors are float32. With `source`, linear layers keep the bytes of the package, except
    for blocks of 32 weights with a changed value. With `source`, an embedding or head that the package has in
    Q8_0 stays in Q8_0, and any other embedding or head becomes float32.

    Args:
        package: a package with a mask.
        values_K: float32 [package.k], the masked weights. None takes the package's values.
        folder: a new or empty folder. Its parent folder must exist.
        kind: the type. None takes `source` if the package has the scheme `source`, else Q8_0.
        like: the GGUF file that the model came from. The new file takes its tokenizer and metadata. Without
            it, the model has the name of the folder.

    Raises:
        InputError: llama.cpp does not support the model or tokenizer, `like` is a file of another model, the
            package has an adapter, values are invalid, the scheme does not allow the type, or the folder is
            not empty.
        ChangeLostError: the file would keep less than `LEAST_KEPT` of the personal change.
        OSError: the file system failed. No folder is left.
    """
    scheme = package.manifest.scheme.name
    if kind is None:
        kind = BlockType.SOURCE if scheme is Scheme.SOURCE else BlockType.Q8_0
    kind = choice_of(BlockType, kind, "a type")
    adapter = package.manifest.adapter
    if adapter is not None:
        raise InputError(
            f"GGUF needs a package with a mask, and this one has an adapter ({adapter.kind}). Export it as "
            "lora or peft, or for transformers."
        )
    values_K = checked_values(package, values_K)
    if kind is BlockType.SOURCE and scheme is not Scheme.SOURCE:
        raise InputError(f"The package is {scheme} and keeps no codes of a GGUF file. Choose the type q8_0.")
    if kind is BlockType.Q4_1:
        raise InputError(
            "Q4_1 cannot be chosen. Only --type source writes it, for packages of scheme source. Use q8_0."
        )
    if kind is BlockType.Q4_0 and scheme is not Scheme.INT4:
        raise InputError(
            f"Q4_0 needs an int4 package. Q4_0 cannot hold the levels of {scheme}. Choose the type "
            + ("source." if scheme is Scheme.SOURCE else "q8_0.")
        )
    with new_folder(folder) as temporary:
        header = _header(package, folder.name, like)
        weights = _Weights(package, values_K, header.description, kind)
        exported = _write_model(weights, header, temporary / GGUF_FILE)
        if exported.kept < LEAST_KEPT:
            finer = BlockType.F32 if kind in (BlockType.F16, BlockType.Q8_0) else BlockType.Q8_0
            raise ChangeLostError(
                f"Only {max(exported.kept, 0):.1%} of the personal change fits into {kind}, "
                f"less than {LEAST_KEPT:.0%}. Choose the type {finer}.",
                finer,
            )
        use = modelfile(GGUF_FILE, header.prompt, header.description.positions)
        write_atomic(temporary / MODELFILE, use.encode())
    return exported


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The metadata of the file: a description of the decoder, a function that writes all keys, prompts."""

    description: Description
    write: Callable[[GGUFWriter], None]
    prompt: PromptRules | None


def _header(package: Package, name: str, like: Path | None) -> _Header:
    """Check that the model can be written, and return the metadata. Raises InputError."""
    if like is not None:
        original = Original(like, package.config, package.find_file)
        return _Header(description=original.description, write=original.write, prompt=original.prompt)
    description, vocabulary = describe(package.config), None
    if "tokenizer.json" in package.manifest.files():
        vocabulary = vocabulary_of(package.find_file, shape_of(package.config).vocabulary)

    def write(writer: GGUFWriter) -> None:
        writer.add_name(name)
        description.write(writer)
        if vocabulary is not None:
            vocabulary.write(writer)
        else:
            # With the model "none", llama.cpp loads the file, but takes only token ids as input, no text.
            writer.add_tokenizer_model("none")

    return _Header(
        description=description, write=write, prompt=None if vocabulary is None else vocabulary.prompt
    )


def _write_model(weights: "_Weights", header: _Header, path: Path) -> GgufExport:
    writer = GGUFWriter(path, header.description.name)
    try:
        header.write(writer)
        layout = weights.layout()
        first = next(iter(layout.values()))[0] if weights.kind is BlockType.SOURCE else weights.kind
        # Programs show this type for the whole file, although each tensor has a type of its own.
        writer.add_file_type(_TYPES[first][1])
        # GGML_QNT_VERSION of llama.cpp, the version of the block formats.
        writer.add_quantization_version(2)
        # A GGUF file lists all tensors before their data, so all types and shapes are written first.
        for tensor, (stored, shape) in layout.items():
            size = int(np.prod(shape[:-1])) * row_bytes(stored, shape[-1])
            writer.add_tensor_info(tensor, shape, np.dtype(np.float32), size, _TYPES[stored][0])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data in weights.encoded():
            writer.write_tensor_data(data)
        writer.flush()
    finally:
        writer.close()
    return GgufExport(
        kind=weights.kind,
        size_bytes=path.stat().st_size,
        kept=weights.kept,
        as_float16=weights.as_float16,
    )


class _Weights:
    """The tensors of the file: first their layout, then their bytes in the same order."""

    def __init__(
        self, package: Package, values_K: NDArray[np.float32], description: Description, kind: BlockType
    ) -> None:
        self._package = package
        self._values_K = values_K
        self.description = description
        self.kind = kind
        self._lost = 0.0
        self._changed = float(((values_K - package.values()) ** 2).sum(dtype=np.float64))
        self.as_float16 = 0

    @property
    def kept(self) -> float:
        """See `GgufExport`. Valid after all tensors are encoded."""
        return 1.0 - self._lost / self._changed if self._changed else 1.0

    def layout(self) -> dict[str, tuple[BlockType, tuple[int, ...]]]:
        """Return type and shape of each tensor by its name in the file."""
        shapes = expected_tensors(self._package.config)
        found: dict[str, tuple[BlockType, tuple[int, ...]]] = {
            self.description.names[info.name]: (self._linear_type(info), info.shape)
            for info in self._package.manifest.tensors
        }
        self.as_float16 = sum(
            stored is BlockType.F16 and self.kind is not stored for stored, _ in found.values()
        )
        for name in self._package.plain_names:
            found[self.description.names[name]] = (self._plain_type(name, shapes[name]), shapes[name])
        if self.description.head_copied:
            name = f"{self.description.decoder.embedding}.weight"
            found["output.weight"] = (self._plain_type(name, shapes[name]), shapes[name])
        factor_E = self.description.rope_factor_E
        return found if factor_E is None else found | {ROPE_FACTORS: (BlockType.F32, factor_E.shape)}

    def encoded(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes, tensor by tensor."""
        yield from self._linear()
        for name in self._package.plain_names:
            yield self._plain(name)
        if self.description.head_copied:
            yield self._plain(f"{self.description.decoder.embedding}.weight")
        if self.description.rope_factor_E is not None:
            yield self.description.rope_factor_E.astype("<f4").view(np.uint8)

    def _linear(self) -> Iterator[NDArray[np.uint8]]:
        start = 0
        for info in self._package.manifest.tensors:
            value_k = self._values_K[start : start + info.count]
            start += info.count
            mask_k, codes = self._package.mask(info.name), self._package.quantized(info.name)
            weight_NK = dequantize(codes)
            weight_NK.reshape(-1)[mask_k] = value_k
            data_NR = self._bytes_of(info, codes, weight_NK, mask_k)
            # Decode the written bytes to measure the error, because the types round most personal values.
            written_NK = dequantize_gguf(data_NR, _TYPES[self._linear_type(info)][0])
            error_k = written_NK.reshape(-1)[mask_k] - value_k
            self._lost += float((error_k**2).sum(dtype=np.float64))
            yield self._ordered(info.name, data_NR)

    def _bytes_of(
        self,
        info: TensorInfo,
        codes: QuantizedTensor,
        weight_NK: NDArray[np.float32],
        mask_k: NDArray[np.uint32],
    ) -> NDArray[np.uint8]:
        if self.kind is BlockType.SOURCE:
            return encode_source(codes, weight_NK, mask_k, name=info.name)
        kind = self._linear_type(info)
        own = OWN_CODES.get(kind) is codes.scheme
        return encode(kind, weight_NK, mask_k=mask_k, codes=codes if own else None, name=info.name)

    def _plain(self, name: str) -> NDArray[np.uint8]:
        tensor = self._package.plain(name)
        number = tensor.float32() + np.float32(self.description.adds_one(name))
        kind = self._plain_type(name, tensor.shape)
        # The package stores Q8_0 in the blocks of GGUF, so copy the bytes.
        if tensor.dtype == Q8_0 and kind is BlockType.Q8_0:
            return self._ordered(name, tensor.data.reshape(tensor.shape[0], -1))
        return self._ordered(name, encode(kind, number.reshape(-1, tensor.shape[-1]), name=name))

    def _linear_type(self, info: TensorInfo) -> BlockType:
        if self.kind is not BlockType.SOURCE:
            return fits(self.kind, info.shape[1])
        return BlockType(type_name(self._package.quantized(info.name)).lower())

    def _plain_type(self, name: str, shape: tuple[int, ...]) -> BlockType:
        """Return the type of a tensor that is no linear weight. llama.cpp needs float32 biases and norms."""
        if len(shape) == 1:
            return BlockType.F32
        if self.kind is BlockType.SOURCE:
            return BlockType.Q8_0 if self._package.plain_dtype(name) == Q8_0 else BlockType.F32
        return fits(BlockType.Q8_0 if self.kind is BlockType.Q4_0 else self.kind, shape[-1])

    def _ordered(self, name: str, data_NR: NDArray[np.uint8]) -> NDArray[np.uint8]:
        bias = name.endswith(".bias")
        # A bias has one float32 for each row of its weight, and is reordered like the rows.
        data_NR = data_NR.reshape(-1, 4) if bias else data_NR
        order_N = self.description.row_order(name, len(data_NR))
        return data_NR if order_N is None else np.ascontiguousarray(data_NR[order_N])
