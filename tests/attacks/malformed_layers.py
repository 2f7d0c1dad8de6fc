"""Packages with layers that must be refused, by code (FORMAT 4): container, codes, mask, adapter, schemes."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from permille.choices import AdapterKind
from permille.digests import canonical_json
from permille.package.build import ChosenAdapter
from permille.package.limits import MAX_HEADER_BYTES
from permille.quantization.types import Scheme
from tests.attacks.forge import Container, Forge, Register, container_bytes
from tests.attacks.malformed_manifests import first, layer_is_missing, layer_with
from tests.unit.package.tiny import LLAMA, WIDE, write_tiny

Q0 = "model.layers.0.self_attn.q_proj.weight"
SOURCE = Scheme.SOURCE
K0, V0 = (Q0.replace("q_proj", name) for name in ("k_proj", "v_proj"))
ODD = LLAMA | {"hidden_size": 9, "intermediate_size": 7, "num_attention_heads": 1, "num_key_value_heads": 1}
REGISTER = Register()
register, attack = REGISTER.add, REGISTER.attack


# --- FORMAT 4.1: container -------------------------------------------------------------------------------


def mask_of(change: Callable[[bytes], bytes], forge: Forge) -> str:
    forge.replace("mask", change(forge.layers["mask"]))
    return forge.seal()


FILES: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("header-size", "a_header_as_long_as_the_file", lambda data: len(data).to_bytes(8, "little") + data[8:]),
    ("header-size", "a_header_of_2_to_the_64", lambda data: (2**64 - 8).to_bytes(8, "little") + data[8:]),
    ("layer-file-size", "bytes_behind_the_last_tensor", lambda data: data + b"tail"),
    ("layer-file-size", "a_last_tensor_that_is_cut", lambda data: data[:-4]),
]
for code, name, change in FILES:
    register(code, f"mask_of_{name}", partial(mask_of, change))


@attack("header-size")
def header_longer_than_eight_megabytes(forge: Forge) -> str:
    size = MAX_HEADER_BYTES + 8
    forge.replace("plain", size.to_bytes(8, "little") + b" " * size)
    return forge.seal()


@attack("header-size")
def file_shorter_than_a_header_length(forge: Forge) -> str:
    forge.replace("plain", b"short")
    return forge.seal()


def container_with(role: str, change: Callable[[Container], object], forge: Forge) -> str:
    container = forge.container(role)
    change(container)
    forge.replace(role, container.data())
    return forge.seal()


def header_of(change: Callable[[dict[str, Any]], bytes], forge: Forge) -> str:
    container = forge.container("mask")
    forge.replace("mask", container_bytes(change(container.entries), bytes(container.body)))
    return forge.seal()


def with_a_tensor_twice(entries: dict[str, Any]) -> bytes:
    data = canonical_json(entries)
    return data[:-1] + b"," + data[data.index(b'"model.layers.1.self_attn.v_proj') : -1] + b"}"


def in_another_order(entries: dict[str, Any]) -> bytes:
    return json.dumps(dict(sorted(entries.items(), reverse=True)), separators=(",", ":")).encode()


HEADERS: list[tuple[str, str, Callable[[dict[str, Any]], bytes]]] = [
    ("header-size", "a_cavity_of_spaces", lambda entries: canonical_json(entries) + b" " * 64),
    ("json-malformed", "a_tensor_twice", with_a_tensor_twice),
    ("json-not-canonical", "another_order", in_another_order),
    ("json-malformed", "a_pickle", lambda entries: b"\x80\x04\x95cposix\nsystem\n"),
    ("header-schema", "a_list", lambda entries: b"[]"),
    (
        "header-schema",
        "other_metadata",
        lambda entries: canonical_json(entries | {"__metadata__": {"format": "pt", "note": "hidden"}}),
    ),
]
for code, name, header in HEADERS:
    register(code, f"header_of_{name}", partial(header_of, header))


def entry_with(fields: dict[str, Any], container: Container) -> None:
    """Change fields of the first entry by name."""
    container.entries[names_of(container)[0]].update(fields)


ENTRIES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("header-schema", "an_unknown_key", "mask", {"stride": [1]}),
    ("header-schema", "a_negative_size", "mask", {"shape": [-1, -5]}),
    ("header-schema", "a_boolean_size", "mask", {"shape": [5, True]}),
    ("header-schema", "a_hundred_dimensions", "mask", {"shape": [5] + [1] * 99}),
    ("header-schema", "three_offsets", "mask", {"data_offsets": [0, 20, 20]}),
    ("header-dtype", "signed_indices", "mask", {"dtype": "I32"}),
    ("header-dtype", "a_list_for_a_dtype", "mask", {"dtype": ["U32"]}),
    ("header-dtype", "no_sign", "mask", {"dtype": "I8"}),
    # 2^62 elements of 4 bytes are 2^64 bytes, which is 0 modulo 2^64.
    ("header-overflow", "a_product_that_wraps", "mask", {"shape": [2**62], "data_offsets": [0, 0]}),
    ("header-overflow", "five_terabytes", "mask", {"shape": [5 << 38], "data_offsets": [0, 5 << 40]}),
    ("header-offsets", "fewer_bytes_than_its_shape", "mask", {"shape": [6]}),
    ("header-offsets", "offsets_that_run_backwards", "mask", {"data_offsets": [20, 0]}),
    ("tensor-shape", "two_dimensions", "mask", {"shape": [5, 1]}),
]
for code, name, role, fields in ENTRIES:
    register(code, f"{role}_entry_with_{name}", partial(container_with, role, partial(entry_with, fields)))


@attack("header-dtype")
def scales_as_bytes(forge: Forge) -> str:
    scales = f"{Q0}.absmax"
    size = forge.container("dense").entries[scales]["shape"][0]
    forge.rewrite("dense", scales, "U8", np.zeros(size, np.uint8))
    return forge.seal()


@attack("header-dtype")
def codes_as_floats(forge: Forge) -> str:
    size = forge.container("dense").entries[Q0]["shape"][0]
    forge.rewrite("dense", Q0, "F32", np.zeros((size, 1), np.float32))
    return forge.seal()


def table_blocks(rows: int, columns: int, scale: float) -> NDArray[np.uint8]:
    """Return a table in Q8_0 whose codes are ones and whose blocks all have this scale."""
    block_R = np.concatenate([np.array([scale], "<f2").view(np.uint8), np.ones(32, np.uint8)])
    return np.tile(block_R, (rows, columns // 32))


def table_in_8_bits(tensor: str, blocks: NDArray[np.uint8], forge: Forge) -> str:
    forge.rewrite("plain", tensor, "U8", blocks)
    return forge.seal()


EMBEDDING = "model.embed_tokens.weight"
TABLES: list[tuple[str, str, str, NDArray[np.uint8]]] = [
    ("plain-scales", "an_infinite_scale", EMBEDDING, table_blocks(64, 32, np.inf)),
    ("plain-scales", "a_scale_that_is_no_number", "lm_head.weight", table_blocks(64, 32, np.nan)),
    ("plain-scales", "a_negative_scale", EMBEDDING, table_blocks(64, 32, -0.5)),
    ("tensor-shape", "a_block_too_many", EMBEDDING, table_blocks(64, 64, 1.0)),
    ("tensor-shape", "a_row_too_few", EMBEDDING, table_blocks(63, 32, 1.0)),
    ("tensor-shape", "blocks_apart", EMBEDDING, table_blocks(64, 32, 1.0).reshape(64, 1, 34)),
    ("header-dtype", "a_norm_in_blocks", "model.norm.weight", np.zeros(34, np.uint8)),
]
for code, name, tensor, blocks in TABLES:
    register(code, f"table_with_{name}", partial(table_in_8_bits, tensor, blocks))


@attack("header-dtype")
def table_of_8_bits_in_rows_that_no_block_fills(forge: Forge) -> str:
    other = Forge(write_tiny(forge.tiny.blobs, config=ODD), forge.target)
    other.rewrite("plain", EMBEDDING, "U8", np.zeros((64, 34), np.uint8))
    return other.seal()


# --- FORMAT 4.2 to 4.7: what layers hold ----------------------------------------------------------------


def number_in(tensor: str, place: tuple[str, int, float], container: Container) -> None:
    dtype, at, value = place
    container.view(tensor, dtype)[at] = value


NUMBERS: list[tuple[str, str, str, tuple[str, int, float]]] = [
    ("dense-scales", "dense", f"{Q0}.absmax", ("<f4", 3, np.inf)),
    ("dense-scales", "dense", f"{Q0}.absmax", ("<f4", 0, np.nan)),
    ("dense-scales", "dense", f"{Q0}.absmax", ("<f4", -1, -0.25)),
    ("dense-code-book", "dense", f"{Q0}.quant_map", ("<f4", 15, 1e30)),
    ("plain-not-finite", "plain", "model.embed_tokens.weight", ("<f4", 7, np.nan)),
    ("plain-not-finite", "plain", "model.norm.weight", ("<f4", -1, -np.inf)),
    ("mask-range", "mask", Q0, ("<u4", -1, 32 * 32)),
    ("mask-range", "mask", Q0, ("<u4", -1, 2**32 - 1)),
    ("values-not-finite", "values", Q0, ("<f4", 0, np.nan)),
]
for code, role, tensor, place in NUMBERS:
    change_number = partial(number_in, tensor, place)
    register(code, f"{place[2]}_in_{tensor}_of_{role}", partial(container_with, role, change_number))


def names_of(container: Container) -> list[str]:
    return sorted(name for name in container.entries if name != "__metadata__")


def overlap(container: Container) -> None:
    one, two = names_of(container)[:2]
    container.entries[two]["data_offsets"] = container.entries[one]["data_offsets"]


def leave_a_hole(container: Container) -> None:
    for name in names_of(container):
        entry = container.entries[name]
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    container.body = bytearray(8) + container.body


def put_floats_behind_bytes(container: Container) -> None:
    codes, scales = container.entries[Q0], container.entries[f"{Q0}.absmax"]
    size = scales["data_offsets"][1] - scales["data_offsets"][0]
    end = codes["data_offsets"][1] - codes["data_offsets"][0]
    container.entries = {
        "__metadata__": container.entries["__metadata__"],
        "a": {**codes, "data_offsets": [0, end]},
        "b": {**scales, "data_offsets": [end, end + size]},
    }


def state_another_shape(container: Container) -> None:
    state = container.view(f"{Q0}.quant_state.bitsandbytes__nf4", "u1")
    state[:] = np.frombuffer(state.tobytes().replace(b"[32, 32]", b"[16, 64]"), np.uint8)


def repeat_an_index(container: Container) -> None:
    indices = container.view(Q0, "<u4")
    indices[2] = indices[1]


def let_indices_fall(container: Container) -> None:
    indices = container.view(Q0, "<u4")
    indices[:] = indices[::-1].copy()


def rename(old: str, new: str, container: Container) -> None:
    container.entries[new] = container.entries.pop(old)


def leave_the_last_out(container: Container) -> None:
    last = max(names_of(container), key=lambda name: container.entries[name]["data_offsets"][0])
    begin, _ = container.entries.pop(last)["data_offsets"]
    del container.body[begin:]


def transpose_the_embedding(container: Container) -> None:
    container.entries["model.embed_tokens.weight"]["shape"].reverse()


CONTAINERS: list[tuple[str, str, Callable[[Container], None]]] = [
    ("header-offsets", "mask", overlap),
    ("header-offsets", "mask", leave_a_hole),
    ("header-offsets", "dense", put_floats_behind_bytes),
    ("dense-code-book", "dense", state_another_shape),
    ("mask-order", "mask", repeat_an_index),
    ("mask-order", "mask", let_indices_fall),
    ("tensor-names", "values", leave_the_last_out),
    ("tensor-shape", "plain", transpose_the_embedding),
    ("tensor-names", "plain", partial(rename, "lm_head.weight", "lm_head.bias")),
    ("tensor-names", "mask", partial(rename, Q0, "lm_head.weight")),
]
for code, role, edit_container in CONTAINERS:
    name = getattr(edit_container, "__name__", "rename")
    register(code, f"{role}_{name}", partial(container_with, role, edit_container))


@attack("dense-padding")
def hidden_bits_in_the_last_nibble(forge: Forge) -> str:
    other = Forge(write_tiny(forge.tiny.blobs, config=ODD), forge.target)
    container = other.container("dense")
    container.view(Q0, "u1")[-1] |= 1
    other.replace("dense", container.data())
    return other.seal()


# --- FORMAT 4.10: adapters -------------------------------------------------------------------------------


def with_an_adapter(change: Callable[[Forge], object], forge: Forge) -> str:
    other = Forge(write_tiny(forge.tiny.blobs, adapter=ADAPTER), forge.target)
    change(other)
    return other.seal()


def adapter_set(fields: dict[str, Any], forge: Forge) -> None:
    forge.manifest["adapter"].update(fields)


def adapter_with(change: Callable[[Container], object], forge: Forge) -> None:
    container_with("adapter", change, forge)


def transpose_a(container: Container) -> None:
    container.entries[Q0]["shape"].reverse()


def one_more_of_b(forge: Forge) -> None:
    first(forge.manifest)["count"] += 1
    forge.manifest["adapter"]["k"] += 1


def layer_beside_an_adapter(role: str, forge: Forge) -> None:
    same = Forge(forge.tiny, forge.target)
    layer = {
        **same.entry("adapter"),
        "role": role,
        "media_type": f"application/vnd.permille.{role}+safetensors",
    }
    at = [entry["role"] for entry in forge.manifest["layers"]].index("adapter")
    forge.manifest["layers"].insert(at if role == "mask" else at + 1, layer)


def mask_for_an_adapter(forge: Forge) -> None:
    forge.manifest["mask"] = {"method": "random", "density": "0.1", "scope": "all", "k": 1}
    del forge.manifest["adapter"]


ADAPTER = ChosenAdapter(kind=AdapterKind.LORA, rank=4, alpha=8)
ADAPTERS: list[tuple[str, str, Callable[[Forge], object]]] = [
    ("manifest-schema", "a_mask_too", lambda f: f.manifest.update(mask=dict(f.manifest["adapter"]))),
    ("manifest-schema", "no_word_of_it", lambda f: f.manifest.pop("adapter")),
    ("manifest-schema", "an_unknown_kind", partial(adapter_set, {"kind": "dora"})),
    ("manifest-schema", "no_rank", partial(adapter_set, {"rank": 0})),
    ("manifest-schema", "an_endless_alpha", partial(adapter_set, {"alpha": 10**9})),
    ("manifest-schema", "a_scope_for_terminals", partial(adapter_set, {"scope": "\x1b[2Jall"})),
    ("manifest-counts", "another_rank", partial(adapter_set, {"rank": 5})),
    ("manifest-counts", "another_kind", partial(adapter_set, {"kind": "lora-fa"})),
    ("manifest-counts", "one_number_more", one_more_of_b),
    ("manifest-layers", "no_layer", lambda f: layer_is_missing("adapter", f)),
    ("manifest-counts", "a_mask_of_other_counts", mask_for_an_adapter),
    *(("manifest-layers", role, partial(layer_beside_an_adapter, role)) for role in ("mask", "values")),
    ("layer-size", "an_exabyte", lambda f: layer_with("adapter", {"size_bytes": 2**60}, f)),
    ("layer-size", "half_of_a", lambda f: layer_with("adapter", {"size_bytes": 3839}, f)),
    ("adapter-not-finite", "nan", partial(adapter_with, partial(number_in, Q0, ("<f2", 5, np.nan)))),
    ("tensor-shape", "a_transposed", partial(adapter_with, transpose_a)),
    ("tensor-names", "another_name", partial(adapter_with, partial(rename, Q0, "lm_head.weight"))),
    ("header-dtype", "whole_numbers", partial(adapter_with, partial(entry_with, {"dtype": "U32"}))),
]
for code, name, alter in ADAPTERS:
    register(code, f"adapter_with_{name}", partial(with_an_adapter, alter))


# --- FORMAT 4.2: schemes ----------------------------------------------------------------------------------


def scheme_with(scheme: Scheme, change: Callable[[Forge], object], forge: Forge) -> str:
    config = WIDE if scheme is SOURCE else ODD
    other = Forge(write_tiny(forge.tiny.blobs, config=config, scheme=scheme), forge.target)
    change(other)
    return other.seal()


def dense_number(name: str, at: int, value: float, forge: Forge, dtype: str = "u1") -> None:
    container = forge.container("dense")
    container.view(name, dtype)[at] = value
    forge.replace("dense", container.data())


def minima_as(name: str, forge: Forge) -> None:
    """Rename the minima of V0."""
    container = forge.container("dense")
    container.entries[name] = container.entries.pop(f"{V0}.minima")
    forge.replace("dense", container.data())


SCHEME_CHANGES: list[tuple[str, str, Scheme, Callable[[Forge], object]]] = [
    ("dense-codes", "a_code_of_minus_128", Scheme.INT8, partial(dense_number, Q0, 7, -128, dtype="i1")),
    (
        "dense-scales",
        "a_scale_below_0",
        Scheme.INT8,
        partial(dense_number, f"{Q0}.scales", 3, -1, dtype="<f4"),
    ),
    (
        "header-dtype",
        "codes_without_sign",
        Scheme.INT8,
        lambda f: f.rewrite("dense", Q0, "U8", np.ones((9, 9), "u1")),
    ),
    (
        "tensor-shape",
        "one_row_of_codes",
        Scheme.INT8,
        lambda f: f.rewrite("dense", Q0, "I8", np.ones((1, 81), "i1")),
    ),
    ("manifest-schema", "a_pattern", Scheme.INT8, lambda f: f.manifest["scheme"].update(sparsity=None)),
    ("manifest-schema", "groups_of_32", Scheme.INT8, lambda f: f.manifest["scheme"].update(group_size=32)),
    ("dense-padding", "a_last_nibble", Scheme.INT4, partial(dense_number, Q0, -1, 1)),
    # The scheme `source` stores Q0 as Q8_0, K0 as Q4_0 and V0 as Q4_1.
    (
        "dense-scales",
        "infinity",
        SOURCE,
        partial(dense_number, f"{Q0}.scales", 3, np.inf, dtype="<f2"),
    ),
    (
        "dense-scales",
        "a_minimum",
        SOURCE,
        partial(dense_number, f"{V0}.minima", 3, np.nan, dtype="<f2"),
    ),
    ("tensor-names", "minima_beside_eight_bits", SOURCE, partial(minima_as, f"{Q0}.minima")),
    ("tensor-names", "a_pattern", SOURCE, partial(minima_as, f"{V0}.pattern")),
    (
        "header-dtype",
        "float32",
        SOURCE,
        lambda f: f.rewrite("dense", f"{K0}.scales", "F32", np.ones((16, 1), "<f4")),
    ),
    (
        "tensor-shape",
        "one_row_of_codes",
        SOURCE,
        lambda f: f.rewrite("dense", Q0, "I8", np.ones((1, 1024), "i1")),
    ),
    (
        "tensor-shape",
        "fewer_minima",
        SOURCE,
        lambda f: f.rewrite("dense", f"{V0}.minima", "F16", np.ones((15, 1), "<f2")),
    ),
    ("manifest-schema", "groups_of_64", SOURCE, lambda f: f.manifest["scheme"].update(group_size=64)),
    (
        "manifest-tensors",
        "rows_that_no_block_fills",
        Scheme.INT4,
        lambda f: f.manifest["scheme"].update(name="source", group_size=32),
    ),
]
for code, name, scheme, change_scheme in SCHEME_CHANGES:
    register(code, f"{scheme}_with_{name}", partial(scheme_with, scheme, change_scheme))
