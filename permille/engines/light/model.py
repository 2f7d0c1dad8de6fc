"""The decoder of a package. Packed weights stay in the mapped file, and norms and biases become float32.

Code of a package is never run. The config selects the mathematics (`permille.models.architecture`), and
`Package.open` has checked that the package has the tensors for it.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from permille.choices import AdapterKind
from permille.engines.inputs import ModelLimits
from permille.engines.light.adapter import LightAdapter
from permille.engines.light.head import LightHead, StoredMatrix
from permille.engines.light.layers import AttentionScores
from permille.engines.light.linear import LightLinear, Tools
from permille.engines.variants import Spans, first_masked, layer_spans
from permille.errors import InputError
from permille.models.architecture import Architecture, LayerSettings, architecture_of
from permille.models.descriptions import NormKind
from permille.package.reader import Package
from permille.quantization.packed_rows import PackedRows
from permille.quantization.types import QuantizedTensor, rows_of

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """Weights of a norm. For RMS_PLUS_ONE, the 1 is already added to them."""

    kind: NormKind
    weight_H: Array
    bias_H: Array | None
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LightLayer:
    """A decoder layer. It has either `fused`, or `query`, `key` and `value`.

    `number` counts from 0, from the embedding on. `gate` and the norms are None if the model family has none.
    """

    number: int
    settings: LayerSettings
    scores: AttentionScores
    fused: LightLinear | None
    query: LightLinear | None
    key: LightLinear | None
    value: LightLinear | None
    output: LightLinear
    gate: LightLinear | None
    up: LightLinear
    down: LightLinear
    norm_attention: Norm | None
    norm_attention_out: Norm | None
    norm_mlp: Norm | None
    norm_mlp_out: Norm | None
    norm_query: Norm | None
    norm_key: Norm | None

    @property
    def projections(self) -> list[LightLinear]:
        """Return the linear layers that compute queries, keys and values."""
        return [linear for linear in (self.fused, self.query, self.key, self.value) if linear is not None]

    @property
    def linears(self) -> list[LightLinear]:
        """Return all linear layers."""
        gate = [] if self.gate is None else [self.gate]
        return [*self.projections, self.output, *gate, self.up, self.down]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LightModel:
    """A model that is ready to run.

    Attributes:
        first_masked: the lowest layer with a trained value.
        spans: for each layer, the slices of the package's values that belong to it.
    """

    architecture: Architecture
    embedding: StoredMatrix
    learned_positions: StoredMatrix | None
    project_in_HE: Array | None
    project_out_EH: Array | None
    layers: tuple[LightLayer, ...]
    final_norm: Norm | None
    head: LightHead
    limits: ModelLimits
    first_masked: int
    spans: Spans
    hidden: int

    def embed(self, id_M: NDArray[np.int64], position_M: NDArray[np.int64]) -> Array:
        """Return the input of the first layer, [M, H]."""
        found_ME = np.empty((len(id_M), self.embedding.width), np.float32)
        self.embedding.look_up(id_M, found_ME)
        out_MH = found_ME if self.project_in_HE is None else found_ME @ self.project_in_HE.T
        if self.architecture.embedding_scale != 1:
            out_MH *= np.float32(self.architecture.embedding_scale)
        if self.learned_positions is not None:
            place_MH = np.empty_like(out_MH)
            # OPT's table of positions starts with rows that no token uses.
            first = self.architecture.learned_positions or 0
            self.learned_positions.look_up(position_M + first, place_MH)
            out_MH += place_MH
        return out_MH


def load_model(package: Package, tools: Tools) -> LightModel:
    """Map the model of a package.

    Raises:
        InputError: the engine does not support the model's mathematics.
        PackageError: the package breaks its format.
    """
    architecture = architecture_of(package.config)
    parts = _Parts(package, architecture)
    embedding = StoredMatrix(package.plain(f"{architecture.embedding}.weight"))
    # A tied head is the same blob as the embedding.
    head = embedding if architecture.tied else StoredMatrix(package.plain("lm_head.weight"))
    spans = layer_spans(package)
    has_positions = architecture.learned_positions is not None
    return LightModel(
        architecture=architecture,
        embedding=embedding,
        learned_positions=StoredMatrix(package.plain("model.decoder.embed_positions.weight"))
        if has_positions
        else None,
        # The embeddings of OPT-350m have another width than its layers.
        project_in_HE=parts.plain("model.decoder.project_in.weight"),
        project_out_EH=parts.plain("model.decoder.project_out.weight"),
        hidden=int(package.config["hidden_size"]),
        layers=tuple(_layer(parts, settings, index) for index, settings in enumerate(architecture.layers)),
        final_norm=parts.norm("", architecture.final_norm, scale=architecture.logits_scale),
        head=LightHead(tools, head, architecture.final_softcap),
        limits=ModelLimits(
            k=package.k,
            vocabulary=embedding.rows,
            positions=architecture.positions,
        ),
        first_masked=first_masked(spans),
        spans=spans,
    )


def _layer(parts: "_Parts", settings: LayerSettings, number: int) -> LightLayer:
    names, prefix = parts.architecture.names, f"{parts.architecture.prefix}.{number}."

    def optional(leaf: str | None) -> LightLinear | None:
        return None if leaf is None else parts.linear(prefix + leaf)

    about = parts.architecture
    fused, query, key, value = (optional(name) for name in (names.fused, names.query, names.key, names.value))
    gate, up = optional(names.gate), parts.linear(prefix + names.up)
    if about.stacked:
        # One matrix holds the layers query, key and value. Another matrix holds gate and up. Cut both
        # matrices into views.
        query, key, value = parts.stacked(f"{prefix}{names.fused}", (about.heads, *[about.kv_heads] * 2))
        gate, up = parts.stacked(prefix + names.up, (1, 1))
        fused = None
    return LightLayer(
        number=number,
        settings=settings,
        scores=AttentionScores(about.attention_scale, settings.window, about.attention_softcap),
        fused=fused,
        query=query,
        key=key,
        value=value,
        output=parts.linear(prefix + names.output),
        gate=gate,
        up=up,
        down=parts.linear(prefix + names.down),
        norm_attention=parts.norm(prefix, names.norm_attention),
        norm_attention_out=parts.norm(prefix, names.norm_attention_out),
        norm_mlp=parts.norm(prefix, names.norm_mlp),
        norm_mlp_out=parts.norm(prefix, names.norm_mlp_out),
        norm_query=parts.norm(prefix, names.norm_query),
        norm_key=parts.norm(prefix, names.norm_key),
    )


class _Parts:
    """Reader of the tensors of one package."""

    def __init__(self, package: Package, architecture: Architecture) -> None:
        self.architecture = architecture
        self._package = package
        self._plain = frozenset(package.plain_names)
        self._adapted = frozenset(info.name for info in package.manifest.tensors if info.count)
        stops = np.cumsum(package.counts)
        self._start = {
            info.name: int(stop) - info.count
            for info, stop in zip(package.manifest.tensors, stops, strict=True)
        }

    def linear(self, path: str) -> LightLinear:
        """Return a linear layer."""
        return self.stacked(path, (1,))[0]

    def stacked(self, path: str, shares: tuple[int, ...]) -> list[LightLinear]:
        """Return the linear layers that one matrix holds, as views of it.

        Args:
            path: the name of the matrix, without `.weight`.
            shares: the relative numbers of rows of the layers.

        Raises:
            InputError: two of these layers share a byte or a block of codes.
        """
        name = f"{path}.weight"
        weight, bias_N = self._package.quantized(name), self.plain(f"{path}.bias")
        total, ends = weight.shape[0], list(accumulate(shares, initial=0))
        return [
            self._rows(name, weight, bias_N, slice(total * first // ends[-1], total * last // ends[-1]))
            for first, last in pairwise(ends)
        ]

    def _rows(self, name: str, weight: QuantizedTensor, bias_N: Array | None, rows: slice) -> LightLinear:
        start, adapter, columns = self._start[name], self._package.manifest.adapter, weight.shape[1]
        if rows.stop - rows.start < weight.shape[0]:
            try:
                weight = rows_of(weight, rows.start, rows.stop)
            except ValueError as exc:
                raise InputError(f"{name} cannot be divided: {exc}. Use --engine torch.") from exc
        coded, bias_N = PackedRows.of(weight), None if bias_N is None else bias_N[rows]
        if adapter is None:
            mask = self._package.mask(name)
            # Mask indices increase, so those within a range of rows are a slice of the array.
            first, last = np.searchsorted(mask, (rows.start * columns, rows.stop * columns)).tolist()
            indices = mask[first:last]
            if rows.start:  # at row 0, subtract nothing, so that the indices stay a view of the mapped file
                indices = indices - np.uint32(rows.start * columns)
            return LightLinear(coded, indices, start + first, bias_N)
        beside = None
        if name in self._adapted:
            frozen_RK = self._package.adapter_matrix(name) if adapter.kind is AdapterKind.LORA_FA else None
            beside = LightAdapter(rows, columns, adapter.rank, adapter.scale, start, frozen_RK)
        # A package with an adapter has no masked weights.
        return LightLinear(coded, np.empty(0, np.uint32), start, bias_N, beside)

    def norm(self, prefix: str, leaf: str | None, *, scale: float = 1.0) -> Norm | None:
        """Return a norm, or None if `leaf` is None. If the norm has no weights in the package, they are 1.

        Args:
            prefix: the prefix of the layer's names.
            leaf: the name within the layer.
            scale: a factor for the weights. For the final norm, this factor scales the logits, because the
                head is linear.
        """
        if leaf is None:
            return None
        kind = self.architecture.norm
        weight_H = self.plain(f"{prefix}{leaf}.weight")
        if weight_H is None:
            # A single number broadcasts to any width.
            weight_H = np.ones(1, np.float32)
        elif kind is NormKind.RMS_PLUS_ONE:
            # Gemma's norms multiply by 1 + w.
            weight_H = weight_H + np.float32(1)
        return Norm(
            kind=kind,
            weight_H=weight_H if scale == 1 else weight_H * np.float32(scale),
            bias_H=self.plain(f"{prefix}{leaf}.bias"),
            epsilon=self.architecture.norm_epsilon,
        )

    def plain(self, name: str) -> Array | None:
        """Return a small unquantized tensor as float32, or None if the package does not have it."""
        return np.array(self._package.plain(name).float32()) if name in self._plain else None
