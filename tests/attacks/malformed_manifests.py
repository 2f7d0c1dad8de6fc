"""Packages whose blobs, manifest or model files must be refused, by code (FORMAT 2, 3).

Attacks that change one value are rows (code, name, change) of tables. The others are functions.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from permille.digests import canonical_json, digest_of
from permille.package.limits import MAX_HEADER_BYTES, MAX_MANIFEST_BYTES
from tests.attacks.forge import Forge, Register
from tests.unit.package.tiny import LLAMA

REGISTER = Register()
register, attack = REGISTER.add, REGISTER.attack


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


for role in ("dense", "values"):
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
    ("manifest-schema", "no_lengths", lambda m: m.pop("lengths")),
    ("manifest-schema", "a_length_that_is_no_number", lambda m: m["lengths"].update(step="nan")),
    ("manifest-schema", "a_length_without_end", lambda m: m["lengths"].update(perturbation="0x1p+2000")),
    ("manifest-schema", "a_length_of_another_spelling", lambda m: m["lengths"].update(step="0x1p-1")),
    ("manifest-schema", "a_length_in_decimals", lambda m: m["lengths"].update(step="half")),
    ("manifest-schema", "a_length_of_zero", lambda m: m["lengths"].update(perturbation=(0.0).hex())),
    ("manifest-schema", "a_third_length", lambda m: m["lengths"].update(step_2=(0.5).hex())),
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
    ("layer-path", "a_path_above_the_folder", "LICENSE", {"path": "../.bashrc"}),
    ("layer-path", "code", "LICENSE", {"path": "modeling_llama.py"}),
    ("layer-path", "no_name", "LICENSE", {"path": None}),
    ("layer-path", "a_path", "mask", {"path": "config.json"}),
    ("layer-size", "an_exabyte", "mask", {"size_bytes": 2**60}),
    ("layer-size", "fewer_bytes_than_codes", "dense", {"size_bytes": 100}),
    ("layer-size", "a_negative_size", "LICENSE", {"size_bytes": -1}),
    ("layer-size", "a_gigabyte", "LICENSE", {"size_bytes": 1 << 30}),
    ("layer-size", "more_than_its_header_allows", "mask", {"size_bytes": 280 + MAX_HEADER_BYTES + 9}),
    ("layer-size", "less_than_four_bytes_a_weight", "mask", {"size_bytes": 279}),
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
for layer in ("mask", "config.json"):
    register("manifest-layers", f"two_of_{layer}", partial(layer_comes_twice, layer))


@attack("manifest-layers")
def values_before_the_mask(forge: Forge) -> str:
    layers = forge.manifest["layers"]
    layers[3], layers[4] = layers[4], layers[3]
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
