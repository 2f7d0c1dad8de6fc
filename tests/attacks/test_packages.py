"""One malformed package, or more, for each code with which a package is refused. All bytes are made here.

What one changed value shows stands in a table, as (code, name, change); what takes more is a function.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.choices import AdapterKind
from permille.digests import canonical_json, digest_of
from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter
from permille.package.limits import MAX_HEADER_BYTES, MAX_MANIFEST_BYTES
from permille.package.plan import check_plan
from permille.package.reader import verify_package
from permille.quantization.types import Scheme, Sparsity
from tests.attacks.forge import Container, Forge, container_bytes
from tests.unit.package.tiny import LLAMA, Tiny, write_tiny

pytestmark = pytest.mark.attack(13, "malformed packages")

Attack = Callable[[Forge], str]
ATTACKS: list[tuple[str, Attack]] = []
NAMES: list[str] = []
PLAN_ATTACKS: list[tuple[str, bytes]] = [
    ("json-size", b" " * (MAX_MANIFEST_BYTES + 1)),
    ("json-malformed", b"{"),
    ("manifest-version", b"{}"),
]
Q0 = "model.layers.0.self_attn.q_proj.weight"
ODD = LLAMA | {"hidden_size": 9, "intermediate_size": 7, "num_attention_heads": 1, "num_key_value_heads": 1}


def register(code: str, name: str, function: Attack) -> None:
    """The attack returns the digest to open, and the reader must answer with this code."""
    ATTACKS.append((code, function))
    NAMES.append(name)


def attack(code: str) -> Callable[[Attack], Attack]:
    """Register a function."""

    def decorate(function: Attack) -> Attack:
        register(code, function.__name__, function)
        return function

    return decorate


# --- FORMAT 2: blobs -------------------------------------------------------------------------------------


@attack("digest-malformed")
def path_instead_of_a_digest(_: Forge) -> str:
    return "../../../etc/passwd"


@attack("digest-malformed")
def digest_with_upper_case(forge: Forge) -> str:
    return forge.seal().upper()


@attack("blob-missing")
def no_manifest(_: Forge) -> str:
    return digest_of(b"nobody wrote this")


@attack("blob-missing")
def no_plain_layer(forge: Forge) -> str:
    digest = forge.seal()
    forge.target.delete(forge.entry("plain")["digest"])
    return digest


@attack("blob-size")
def stored_layer_is_cut(forge: Forge) -> str:
    digest = forge.seal()
    forge.overwrite(forge.entry("dense")["digest"], forge.layers["dense"][:-1])
    return digest


@attack("blob-digest")
def stored_manifest_is_another(forge: Forge) -> str:
    digest = forge.seal()
    forge.manifest["provenance"] = {"seed": 666}
    forge.overwrite(digest, canonical_json(forge.manifest))
    return digest


def one_bit_is_flipped(role: str, forge: Forge) -> str:
    digest = forge.seal()
    data = forge.layers[role]
    forge.overwrite(forge.entry(role)["digest"], data[:-1] + bytes([data[-1] ^ 1]))
    return digest


for role in ("dense", "values", "exponents"):
    register("blob-digest", f"one_bit_of_{role}", partial(one_bit_is_flipped, role))


# --- FORMAT 3: manifest ----------------------------------------------------------------------------------


def manifest_of_other_bytes(change: Callable[[bytes], bytes], forge: Forge) -> str:
    return forge.seal_bytes(change(canonical_json(forge.manifest)))


OTHER_BYTES: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("blob-size", "five_megabytes", lambda data: b" " * (MAX_MANIFEST_BYTES + 1)),
    ("json-malformed", "a_pickle", lambda data: b"\x80\x04\x95pickle."),
    ("json-malformed", "a_key_twice", lambda data: b'{"format":"permille-package",' + data[1:]),
    ("json-malformed", "a_float", lambda data: data.replace(b'"version":1', b'"version":1.0')),
    ("json-malformed", "nan", lambda data: data.replace(b'"version":1', b'"version":NaN')),
    ("json-malformed", "nested_a_million_deep", lambda data: b"[" * 1_000_000),
    (
        "json-malformed",
        "nested_a_little_too_deep",
        lambda data: data.replace(b'{"seed":0}', b'{"seed":' + b"[" * 40 + b"]" * 40 + b"}"),
    ),
    ("json-malformed", "ten_thousand_digits", lambda data: data.replace(b'"k":', b'"k":' + b"9" * 10_000)),
    ("json-malformed", "half_a_character", lambda data: data.replace(b'"random"', b'"\\ud800"')),
    ("json-not-canonical", "spaces", lambda data: json.dumps(json.loads(data), sort_keys=True).encode()),
    ("json-not-canonical", "a_line_behind", lambda data: data + b"\n"),
    ("manifest-schema", "a_list", lambda data: b"[]"),
]
for code, name, change in OTHER_BYTES:
    register(code, f"manifest_of_{name}", partial(manifest_of_other_bytes, change))


def manifest_with(change: Callable[[dict[str, Any]], object], forge: Forge) -> str:
    change(forge.manifest)
    return forge.seal()


def first(m: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = m["tensors"][0]
    return found


def mask_nothing(m: dict[str, Any]) -> None:
    m["mask"]["k"] = 0
    for tensor in m["tensors"]:
        tensor["count"] = 0


def move_a_count(m: dict[str, Any]) -> None:
    m["tensors"][0]["count"] += 1
    m["tensors"][1]["count"] -= 1


OTHER_VALUES: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("manifest-version", "the_future", lambda m: m.update(version=2)),
    ("manifest-version", "another_format", lambda m: m.update(format="oci-image")),
    ("manifest-schema", "an_unknown_key", lambda m: m.update(hook="https://example.com")),
    ("manifest-schema", "no_provenance", lambda m: m.pop("provenance")),
    ("manifest-schema", "a_boolean_count", lambda m: first(m).update(count=True)),
    ("manifest-schema", "a_shape_of_three", lambda m: first(m).update(shape=[32, 16, 2])),
    ("manifest-schema", "an_unknown_scheme", lambda m: m["scheme"].update(name="pickle")),
    ("manifest-schema", "an_unknown_role", lambda m: m["layers"][0].update(role="code")),
    ("manifest-schema", "another_schemes_group_size", lambda m: m["scheme"].update(group_size=1)),
    ("manifest-schema", "a_density_that_is_no_number", lambda m: m["mask"].update(density="1e-3")),
    ("manifest-schema", "a_method_for_terminals", lambda m: m["mask"].update(method="\x1b[2Jrandom")),
    ("manifest-tensors", "no_tensors", lambda m: m.update(tensors=[])),
    ("manifest-tensors", "a_tensor_twice", lambda m: m["tensors"].append(first(m))),
    ("manifest-tensors", "a_shape_that_wraps", lambda m: first(m).update(shape=[2**32 + 1, 2**32])),
    ("manifest-tensors", "a_negative_shape", lambda m: first(m).update(shape=[-32, -32])),
    ("manifest-counts", "more_masked_than_weights", lambda m: first(m).update(count=32 * 32 + 1)),
    ("manifest-counts", "a_negative_count", lambda m: first(m).update(count=-5)),
    ("manifest-counts", "counts_that_do_not_add_up", lambda m: m["mask"].update(k=m["mask"]["k"] + 1)),
    ("manifest-counts", "nothing_masked", mask_nothing),
    ("manifest-layers", "another_order_of_layers", lambda m: m["layers"].reverse()),
    ("manifest-layers", "another_config", lambda m: m["model"].update(config=digest_of(b"{}"))),
    ("config-model", "another_family", lambda m: m["model"].update(family="mistral")),
    ("tensor-shape", "counts_of_the_next_tensor", move_a_count),
    ("tensor-shape", "another_order_of_tensors", lambda m: m["tensors"].reverse()),
]
for code, name, edit in OTHER_VALUES:
    register(code, f"manifest_with_{name}", partial(manifest_with, edit))


def layer_with(layer: str, fields: dict[str, Any], forge: Forge) -> str:
    forge.entry(layer).update(fields)
    return forge.seal()


MEDIA_TYPE = "application/vnd.permille.values+safetensors"
OTHER_LAYERS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("digest-malformed", "a_path_for_a_digest", "mask", {"digest": "sha256:" + "../" * 19 + "etc/pwd"}),
    ("manifest-schema", "another_media_type", "mask", {"media_type": MEDIA_TYPE}),
    ("manifest-schema", "another_media_type", "exponents", {"media_type": MEDIA_TYPE}),
    ("layer-path", "a_path_above_the_folder", "LICENSE", {"path": "../.bashrc"}),
    ("layer-path", "code", "LICENSE", {"path": "modeling_llama.py"}),
    ("layer-path", "no_name", "LICENSE", {"path": None}),
    ("layer-path", "a_path", "mask", {"path": "config.json"}),
    ("layer-path", "a_path", "exponents", {"path": "config.json"}),
    ("layer-size", "an_exabyte", "mask", {"size_bytes": 2**60}),
    ("layer-size", "fewer_bytes_than_codes", "dense", {"size_bytes": 100}),
    ("layer-size", "a_negative_size", "LICENSE", {"size_bytes": -1}),
    ("layer-size", "a_gigabyte", "LICENSE", {"size_bytes": 1 << 30}),
    ("layer-size", "more_than_its_header_allows", "exponents", {"size_bytes": 70 + MAX_HEADER_BYTES + 9}),
    ("layer-size", "less_than_a_byte_a_weight", "exponents", {"size_bytes": 69}),
]
for code, name, layer, fields in OTHER_LAYERS:
    register(code, f"{layer}_with_{name}", partial(layer_with, layer, fields))


@attack("blob-size")
def size_in_the_manifest_is_one_less(forge: Forge) -> str:
    forge.entry("plain")["size_bytes"] -= 1
    return forge.seal()


def layer_is_missing(layer: str, forge: Forge) -> str:
    forge.manifest["layers"].remove(forge.entry(layer))
    return forge.seal()


def layer_comes_twice(layer: str, forge: Forge) -> str:
    layers = forge.manifest["layers"]
    layers.insert(layers.index(forge.entry(layer)), forge.entry(layer))
    return forge.seal()


for layer in ("mask", "config.json"):
    register("manifest-layers", f"no_{layer}", partial(layer_is_missing, layer))
for layer in ("mask", "exponents", "config.json"):
    register("manifest-layers", f"two_of_{layer}", partial(layer_comes_twice, layer))


@attack("manifest-layers")
def exponents_before_the_values(forge: Forge) -> str:
    layers = forge.manifest["layers"]
    layers[4], layers[5] = layers[5], layers[4]
    return forge.seal()


@attack("manifest-layers")
def no_hashes_of_blocks(forge: Forge) -> str:
    forge.manifest["layers"].remove(forge.entry("blocks"))
    return forge.seal_as_it_is()


@attack("layer-size")
def a_hash_of_a_block_too_few(forge: Forge) -> str:
    forge.replace("blocks", forge.layers["blocks"][:-32])
    return forge.seal_as_it_is()


@attack("layer-size")
def a_hash_of_a_block_too_many(forge: Forge) -> str:
    forge.replace("blocks", forge.layers["blocks"] + bytes(32))
    return forge.seal_as_it_is()


@attack("block-digest")
def a_hash_of_another_block(forge: Forge) -> str:
    forge.replace("blocks", forge.layers["blocks"][::-1])
    return forge.seal_as_it_is()


# --- FORMAT 3.3: config ----------------------------------------------------------------------------------


def config_of(data: bytes, forge: Forge) -> str:
    forge.replace("config.json", data)
    return forge.seal()


CONFIGS: list[tuple[str, str, bytes]] = [
    ("config-malformed", "no_json", b"model_type: llama"),
    ("config-malformed", "a_list", b"[]"),
    ("config-malformed", "a_key_twice", b'{"model_type":"llama","model_type":"opt"}'),
    ("config-malformed", "a_number_that_becomes_infinity", b'{"rms_norm_eps":1e999}'),
    ("config-malformed", "a_million_levels", b'{"a":' * 1_000_000),
    ("config-malformed", "nine_megabytes", b" " * (9 << 20)),
    ("config-model", "no_sizes", b'{"model_type":"llama"}'),
]
CONFIG_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("config-malformed", "infinity", {"rms_norm_eps": float("inf")}),
    ("config-malformed", "too_deep", {"rope_scaling": {"a": {"b": {"c": {"d": {"e": 1}}}}}}),
    ("config-malformed", "a_long_text", {"hidden_act": "x" * 10_000}),
    ("config-key", "code", {"auto_map": {"AutoModelForCausalLM": "evil--modeling.Model"}}),
    ("config-key", "kernels_from_a_hub", {"attn_implementation": "someone/kernels"}),
    ("config-key", "a_quantization", {"quantization_config": {"quant_method": "gptq"}}),
    ("config-model", "an_unknown_family", {"model_type": "mamba"}),
    ("config-model", "a_billion_layers", {"num_hidden_layers": 10**9}),
    ("tensor-shape", "a_wider_model", {"intermediate_size": 64}),
]
CONFIGS += [(code, name, json.dumps(LLAMA | fields).encode()) for code, name, fields in CONFIG_FIELDS]
for code, name, data in CONFIGS:
    register(code, f"config_of_{name}", partial(config_of, data))


@attack("config-malformed")
def tokenizer_config_is_no_json(forge: Forge) -> str:
    forge.rename("LICENSE", "tokenizer_config.json")
    return forge.seal()


@attack("config-key")
def tokenizer_config_with_code(forge: Forge) -> str:
    forge.rename("LICENSE", "tokenizer_config.json")
    forge.replace("tokenizer_config.json", b'{"auto_map":{"AutoTokenizer":["evil.Tokenizer",null]}}')
    return forge.seal()


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
    """Another entry for the layer's first tensor by name."""
    container.entries[names_of(container)[0]].update(fields)


ENTRIES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("header-schema", "an_unknown_key", "mask", {"stride": [1]}),
    ("header-schema", "a_negative_size", "mask", {"shape": [-1, -5]}),
    ("header-schema", "a_boolean_size", "mask", {"shape": [5, True]}),
    ("header-schema", "a_hundred_dimensions", "mask", {"shape": [5] + [1] * 99}),
    ("header-schema", "three_offsets", "mask", {"data_offsets": [0, 20, 20]}),
    ("header-dtype", "signed_indices", "mask", {"dtype": "I32"}),
    ("header-dtype", "a_list_for_a_dtype", "mask", {"dtype": ["U32"]}),
    ("header-dtype", "no_sign", "exponents", {"dtype": "U8"}),
    # 2^62 * 4 bytes is 0 modulo 2^64
    ("header-overflow", "a_product_that_wraps", "mask", {"shape": [2**62], "data_offsets": [0, 0]}),
    ("header-overflow", "five_terabytes", "mask", {"shape": [5 << 38], "data_offsets": [0, 5 << 40]}),
    ("header-offsets", "fewer_bytes_than_its_shape", "mask", {"shape": [6]}),
    ("header-offsets", "offsets_that_run_backwards", "mask", {"data_offsets": [20, 0]}),
    ("tensor-shape", "two_dimensions", "exponents", {"shape": [5, 1]}),
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
    ("exponents-range", "exponents", Q0, ("i1", 2, 16)),
    ("exponents-range", "exponents", Q0, ("i1", 2, -1)),
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


def begin_at_one(container: Container) -> None:
    np.frombuffer(container.body, np.int8)[:] = 1


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
    ("exponents-range", "exponents", begin_at_one),
    ("tensor-names", "values", leave_the_last_out),
    ("tensor-shape", "plain", transpose_the_embedding),
    ("tensor-names", "plain", partial(rename, "lm_head.weight", "lm_head.bias")),
    ("tensor-names", "exponents", partial(rename, Q0, "lm_head.weight")),
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


@attack("tensor-shape")
def exponents_of_one_weight_less(forge: Forge) -> str:
    forge.rewrite("exponents", Q0, "I8", np.ones(4, np.int8))
    # The layer must weigh a byte for each masked weight, so the missing one is added elsewhere.
    forge.rewrite("exponents", Q0.replace("q_proj", "k_proj"), "I8", np.ones(6, np.int8))
    return forge.seal()


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
    *(
        ("manifest-layers", role, partial(layer_beside_an_adapter, role))
        for role in ("mask", "values", "exponents")
    ),
    ("layer-size", "an_exabyte", lambda f: layer_with("adapter", {"size_bytes": 2**60}, f)),
    ("layer-size", "half_of_a", lambda f: layer_with("adapter", {"size_bytes": 3839}, f)),
    ("adapter-not-finite", "nan", partial(adapter_with, partial(number_in, Q0, ("<f2", 5, np.nan)))),
    ("tensor-shape", "a_transposed", partial(adapter_with, transpose_a)),
    ("tensor-names", "another_name", partial(adapter_with, partial(rename, Q0, "lm_head.weight"))),
    ("header-dtype", "whole_numbers", partial(adapter_with, partial(entry_with, {"dtype": "U32"}))),
]
for code, name, alter in ADAPTERS:
    register(code, f"adapter_with_{name}", partial(with_an_adapter, alter))


# --- FORMAT 4.2: sparse weights ---------------------------------------------------------------------------

# 36 columns are no whole bytes of a bitmap, 44 rows no threes.
SPARSE = LLAMA | {
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
GATE = "model.layers.0.mlp.gate_proj.weight"


def scheme_with(scheme: Scheme, change: Callable[[Forge], object], forge: Forge) -> str:
    other = Forge(write_tiny(forge.tiny.blobs, config=ODD, scheme=scheme), forge.target)
    change(other)
    return other.seal()


def sparse_with(sparsity: Sparsity, change: Callable[[Forge], object], forge: Forge) -> str:
    other = Forge(write_tiny(forge.tiny.blobs, config=SPARSE, sparsity=sparsity), forge.target)
    change(other)
    return other.seal()


def dense_number(name: str, at: int, value: float, forge: Forge, dtype: str = "u1") -> None:
    container = forge.container("dense")
    container.view(name, dtype)[at] = value
    forge.replace("dense", container.data())


def dense_of_other_size(name: str, dtype: str, fewer: int, forge: Forge) -> None:
    numbers = forge.container("dense").view(name, dtype)
    forge.rewrite("dense", name, {"u1": "U8", "<f4": "F32"}[dtype], np.resize(numbers, len(numbers) - fewer))


def more_bits(forge: Forge) -> None:
    container = forge.container("dense")
    container.view(f"{GATE}.pattern", "u1")[::5] = 255
    forge.replace("dense", container.data())


def mask_a_pruned_weight(forge: Forge) -> None:
    container = forge.container("mask")
    kept = container.view(GATE, "<u4")
    kept[0] = next(at for at in range(4) if at not in np.flatnonzero(forge.tiny.weights[GATE].float32())[:2])
    forge.replace("mask", container.data())


def rename_a_pattern(forge: Forge) -> None:
    container = forge.container("dense")
    rename(f"{GATE}.pattern", f"{GATE}.patterns", container)
    forge.replace("dense", container.data())


TWO, BITS = Sparsity.TWO_OF_FOUR, Sparsity.BITMAP
SPARSE_CHANGES: list[tuple[str, str, Sparsity, Callable[[Forge], object]]] = [
    ("pattern-range", "no_three_patterns", TWO, partial(dense_number, f"{GATE}.pattern", 3, 216)),
    ("pattern-padding", "a_row_below_the_last", TWO, partial(dense_number, f"{GATE}.pattern", -1, 215)),
    ("pattern-padding", "a_column_behind_the_last", BITS, partial(dense_number, f"{GATE}.pattern", 4, 0x10)),
    ("pattern-count", "bits_that_are_added", BITS, more_bits),
    ("pattern-count", "codes_that_are_cut", BITS, partial(dense_of_other_size, GATE, "u1", 1)),
    ("pattern-count", "scales_that_are_cut", BITS, partial(dense_of_other_size, f"{GATE}.scales", "<f4", 1)),
    ("tensor-shape", "codes_that_are_cut", TWO, partial(dense_of_other_size, GATE, "u1", 1)),
    ("tensor-shape", "no_codes", BITS, partial(dense_of_other_size, GATE, "u1", 792 // 2)),
    ("mask-pruned", "a_masked_weight_that_is_pruned", TWO, mask_a_pruned_weight),
    ("mask-pruned", "a_masked_weight_that_is_pruned", BITS, mask_a_pruned_weight),
    ("manifest-schema", "an_unknown_pattern", TWO, lambda f: f.manifest["scheme"].update(sparsity="4:8")),
    ("manifest-schema", "a_number_for_a_pattern", TWO, lambda f: f.manifest["scheme"].update(sparsity=2)),
    ("tensor-names", "a_dense_package", TWO, lambda f: f.manifest["scheme"].update(sparsity=None)),
    ("tensor-names", "no_pattern_of_this_name", TWO, rename_a_pattern),
]
for code, name, sparsity, change_sparse in SPARSE_CHANGES:
    register(code, f"{sparsity}_with_{name}", partial(sparse_with, sparsity, change_sparse))


BOOKS = f"{Q0}.code_books"
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
    ("manifest-schema", "a_pattern", Scheme.INT8, lambda f: f.manifest["scheme"].update(sparsity="bitmap")),
    ("manifest-schema", "groups_of_32", Scheme.INT8, lambda f: f.manifest["scheme"].update(group_size=32)),
    (
        "dense-code-book",
        "not_a_number",
        Scheme.SQUEEZELLM,
        partial(dense_number, BOOKS, 17, np.nan, dtype="<f2"),
    ),
    (
        "dense-code-book",
        "infinity",
        Scheme.SQUEEZELLM,
        partial(dense_number, BOOKS, -1, -np.inf, dtype="<f2"),
    ),
    ("dense-padding", "a_last_nibble", Scheme.SQUEEZELLM, partial(dense_number, Q0, -1, 1)),
    (
        "header-dtype",
        "float32",
        Scheme.SQUEEZELLM,
        lambda f: f.rewrite("dense", BOOKS, "F32", np.ones((9, 16), "<f4")),
    ),
    (
        "tensor-shape",
        "a_book_of_15",
        Scheme.SQUEEZELLM,
        lambda f: f.rewrite("dense", BOOKS, "F16", np.ones((9, 15), "<f2")),
    ),
    (
        "tensor-names",
        "no_books",
        Scheme.SQUEEZELLM,
        lambda f: f.manifest["scheme"].update(name="int4", group_size=32),
    ),
    ("manifest-schema", "a_group", Scheme.SQUEEZELLM, lambda f: f.manifest["scheme"].update(group_size=9)),
]
for code, name, scheme, change_scheme in SCHEME_CHANGES:
    register(code, f"{scheme}_with_{name}", partial(scheme_with, scheme, change_scheme))


@attack("manifest-tensors")
def two_of_four_of_a_width_of_nine(forge: Forge) -> str:
    other = Forge(write_tiny(forge.tiny.blobs, config=ODD), forge.target)
    other.manifest["scheme"]["sparsity"] = "2:4"
    return other.seal()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    exponents = (np.arange(70) % 16).astype(np.int8)
    return write_tiny(BlobFolder(tmp_path_factory.mktemp("good")), exponents=exponents)


@pytest.fixture
def forge(tiny: Tiny, tmp_path: Path) -> Iterator[Forge]:
    yield Forge(tiny, BlobFolder(tmp_path))


def test_a_package_that_was_only_taken_apart_and_sealed_again_verifies(forge: Forge, tiny: Tiny) -> None:
    for role in ("dense", "plain", "mask", "values", "exponents"):
        forge.replace(role, forge.container(role).data())
    assert forge.seal() == tiny.digest
    assert verify_package(forge.target, tiny.digest).k == tiny.manifest.k


@pytest.mark.parametrize(("code", "build"), ATTACKS, ids=NAMES)
def test_reader_refuses(code: str, build: Attack, forge: Forge) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        verify_package(forge.target, build(forge))


@pytest.mark.parametrize(("code", "manifest"), PLAN_ATTACKS, ids=[code for code, _ in PLAN_ATTACKS])
def test_plan_refuses_before_a_download(code: str, manifest: bytes) -> None:
    with pytest.raises(PackageError, match=f"^{code}:"):
        check_plan(manifest, digest_of(manifest), 1 << 40)
