"""One malformed package, or more, for each code with which a package is refused. All bytes are made here."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.digests import canonical_json, digest_of
from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import MAX_HEADER_BYTES, MAX_MANIFEST_BYTES
from permille.package.plan import check_plan
from permille.package.reader import verify_package
from tests.attacks.forge import Forge, container_bytes
from tests.unit.package.tiny import LLAMA, Tiny, write_tiny

Attack = Callable[[Forge], str]
ATTACKS: list[tuple[str, Attack]] = []
PLAN_ATTACKS: list[tuple[str, bytes]] = [
    ("json-size", b" " * (MAX_MANIFEST_BYTES + 1)),
    ("json-malformed", b"{"),
    ("manifest-version", b"{}"),
]
Q0 = "model.layers.0.self_attn.q_proj.weight"


def attack(code: str) -> Callable[[Attack], Attack]:
    """Register an attack: it returns the digest to open, and the reader must answer with this code."""

    def register(function: Attack) -> Attack:
        ATTACKS.append((code, function))
        return function

    return register


# --- FORMAT 2: blobs -------------------------------------------------------------------------------------


@attack("digest-malformed")
def path_instead_of_a_digest(_: Forge) -> str:
    return "../../../etc/passwd"


@attack("digest-malformed")
def digest_with_upper_case(forge: Forge) -> str:
    return forge.seal().upper()


@attack("digest-malformed")
def layer_with_a_path_for_a_digest(forge: Forge) -> str:
    forge.entry("mask")["digest"] = (
        "sha256:../../../../../../../../../../../../../../../../../../../etc/passwd"
    )
    return forge.seal()


@attack("blob-missing")
def no_manifest(_: Forge) -> str:
    return digest_of(b"nobody wrote this")


@attack("blob-missing")
def no_plain_layer(forge: Forge) -> str:
    digest = forge.seal()
    forge.target.delete(forge.entry("plain")["digest"])
    return digest


@attack("blob-size")
def size_in_the_manifest_is_one_less(forge: Forge) -> str:
    forge.entry("plain")["size_bytes"] -= 1
    return forge.seal()


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


@attack("blob-digest")
def one_bit_of_the_dense_layer_is_flipped(forge: Forge) -> str:
    digest = forge.seal()
    data = forge.layers["dense"]
    forge.overwrite(forge.entry("dense")["digest"], data[:-1] + bytes([data[-1] ^ 1]))
    return digest


@attack("blob-digest")
def one_bit_of_the_values_is_flipped(forge: Forge) -> str:
    digest = forge.seal()
    data = forge.layers["values"]
    forge.overwrite(forge.entry("values")["digest"], data[:-1] + bytes([data[-1] ^ 1]))
    return digest


# --- FORMAT 3: manifest ----------------------------------------------------------------------------------


@attack("blob-size")
def manifest_of_five_megabytes(forge: Forge) -> str:
    return forge.seal_bytes(b" " * (MAX_MANIFEST_BYTES + 1))


@attack("json-malformed")
def manifest_is_no_json(forge: Forge) -> str:
    return forge.seal_bytes(b"\x80\x04\x95pickle.")


@attack("json-malformed")
def manifest_with_a_key_twice(forge: Forge) -> str:
    data = canonical_json(forge.manifest)
    return forge.seal_bytes(b'{"format":"permille-package",' + data[1:])


@attack("json-malformed")
def manifest_with_a_float(forge: Forge) -> str:
    data = canonical_json(forge.manifest)
    return forge.seal_bytes(data.replace(b'"version":1', b'"version":1.0'))


@attack("json-malformed")
def manifest_with_nan(forge: Forge) -> str:
    data = canonical_json(forge.manifest)
    return forge.seal_bytes(data.replace(b'"version":1', b'"version":NaN'))


@attack("json-malformed")
def manifest_nested_a_million_deep(forge: Forge) -> str:
    return forge.seal_bytes(b"[" * 1_000_000)


@attack("json-malformed")
def manifest_nested_a_little_too_deep(forge: Forge) -> str:
    data = canonical_json(forge.manifest)
    return forge.seal_bytes(data.replace(b'{"seed":0}', b'{"seed":' + b"[" * 40 + b"]" * 40 + b"}"))


@attack("json-malformed")
def manifest_with_a_number_of_ten_thousand_digits(forge: Forge) -> str:
    data = canonical_json(forge.manifest)
    return forge.seal_bytes(data.replace(b'"k":', b'"k":' + b"9" * 10_000))


@attack("json-malformed")
def manifest_with_half_a_character(forge: Forge) -> str:
    data = canonical_json(forge.manifest)
    return forge.seal_bytes(data.replace(b'"random"', b'"\\ud800"'))


@attack("json-not-canonical")
def manifest_with_spaces(forge: Forge) -> str:
    return forge.seal_bytes(json.dumps(forge.manifest, sort_keys=True).encode())


@attack("json-not-canonical")
def manifest_with_a_line_behind(forge: Forge) -> str:
    return forge.seal_bytes(canonical_json(forge.manifest) + b"\n")


@attack("manifest-version")
def manifest_of_the_future(forge: Forge) -> str:
    forge.manifest["version"] = 2
    return forge.seal()


@attack("manifest-version")
def manifest_of_another_format(forge: Forge) -> str:
    forge.manifest["format"] = "oci-image"
    return forge.seal()


@attack("manifest-schema")
def manifest_is_a_list(forge: Forge) -> str:
    return forge.seal_bytes(b"[]")


@attack("manifest-schema")
def manifest_with_an_unknown_key(forge: Forge) -> str:
    forge.manifest["hook"] = "https://example.com"
    return forge.seal()


@attack("manifest-schema")
def manifest_without_provenance(forge: Forge) -> str:
    del forge.manifest["provenance"]
    return forge.seal()


@attack("manifest-schema")
def count_is_a_boolean(forge: Forge) -> str:
    forge.manifest["tensors"][0]["count"] = True
    return forge.seal()


@attack("manifest-schema")
def shape_of_three(forge: Forge) -> str:
    forge.manifest["tensors"][0]["shape"] = [32, 16, 2]
    return forge.seal()


@attack("manifest-schema")
def unknown_scheme(forge: Forge) -> str:
    forge.manifest["scheme"]["name"] = "pickle"
    return forge.seal()


@attack("manifest-schema")
def unknown_role(forge: Forge) -> str:
    forge.manifest["layers"][0]["role"] = "code"
    return forge.seal()


@attack("manifest-schema")
def group_size_of_another_scheme(forge: Forge) -> str:
    forge.manifest["scheme"]["group_size"] = 1
    return forge.seal()


@attack("manifest-schema")
def density_is_no_number(forge: Forge) -> str:
    forge.manifest["mask"]["density"] = "1e-3"
    return forge.seal()


@attack("manifest-schema")
def media_type_of_another_role(forge: Forge) -> str:
    forge.entry("mask")["media_type"] = forge.entry("plain")["media_type"]
    return forge.seal()


@attack("manifest-schema")
def method_that_writes_to_a_terminal(forge: Forge) -> str:
    forge.manifest["mask"]["method"] = "\x1b[2Jrandom"
    return forge.seal()


@attack("manifest-tensors")
def no_tensors(forge: Forge) -> str:
    forge.manifest["tensors"] = []
    return forge.seal()


@attack("manifest-tensors")
def tensor_twice(forge: Forge) -> str:
    forge.manifest["tensors"].append(forge.manifest["tensors"][0])
    return forge.seal()


@attack("manifest-tensors")
def shape_whose_product_wraps_in_64_bits(forge: Forge) -> str:
    forge.manifest["tensors"][0]["shape"] = [2**32 + 1, 2**32]
    return forge.seal()


@attack("manifest-tensors")
def negative_shape(forge: Forge) -> str:
    forge.manifest["tensors"][0]["shape"] = [-32, -32]
    return forge.seal()


@attack("manifest-counts")
def more_masked_weights_than_weights(forge: Forge) -> str:
    forge.manifest["tensors"][0]["count"] = 32 * 32 + 1
    return forge.seal()


@attack("manifest-counts")
def negative_count(forge: Forge) -> str:
    forge.manifest["tensors"][0]["count"] = -5
    return forge.seal()


@attack("manifest-counts")
def counts_that_do_not_add_up(forge: Forge) -> str:
    forge.manifest["mask"]["k"] += 1
    return forge.seal()


@attack("manifest-counts")
def nothing_masked(forge: Forge) -> str:
    forge.manifest["mask"]["k"] = 0
    for tensor in forge.manifest["tensors"]:
        tensor["count"] = 0
    return forge.seal()


@attack("manifest-layers")
def no_mask(forge: Forge) -> str:
    forge.manifest["layers"].remove(forge.entry("mask"))
    return forge.seal()


@attack("manifest-layers")
def two_masks(forge: Forge) -> str:
    forge.manifest["layers"].insert(2, forge.entry("mask"))
    return forge.seal()


@attack("manifest-layers")
def one_file_twice(forge: Forge) -> str:
    forge.manifest["layers"].append(forge.entry("config.json"))
    return forge.seal()


@attack("manifest-layers")
def layers_in_another_order(forge: Forge) -> str:
    forge.manifest["layers"].reverse()
    return forge.seal()


@attack("manifest-layers")
def no_config(forge: Forge) -> str:
    forge.manifest["layers"].remove(forge.entry("config.json"))
    return forge.seal()


@attack("manifest-layers")
def model_names_another_config(forge: Forge) -> str:
    forge.manifest["model"]["config"] = digest_of(b"{}")
    return forge.seal()


@attack("layer-path")
def file_above_the_folder(forge: Forge) -> str:
    forge.entry("LICENSE")["path"] = "../.bashrc"
    return forge.seal()


@attack("layer-path")
def file_with_code(forge: Forge) -> str:
    forge.entry("LICENSE")["path"] = "modeling_llama.py"
    return forge.seal()


@attack("layer-path")
def file_without_a_name(forge: Forge) -> str:
    forge.entry("LICENSE")["path"] = None
    return forge.seal()


@attack("layer-path")
def mask_with_a_path(forge: Forge) -> str:
    forge.entry("mask")["path"] = "config.json"
    return forge.seal()


@attack("layer-size")
def mask_that_weighs_an_exabyte(forge: Forge) -> str:
    forge.entry("mask")["size_bytes"] = 2**60
    return forge.seal()


@attack("layer-size")
def dense_layer_lighter_than_its_codes(forge: Forge) -> str:
    forge.entry("dense")["size_bytes"] = 100
    return forge.seal()


@attack("layer-size")
def negative_size(forge: Forge) -> str:
    forge.entry("LICENSE")["size_bytes"] = -1
    return forge.seal()


@attack("layer-size")
def file_of_a_gigabyte(forge: Forge) -> str:
    forge.entry("LICENSE")["size_bytes"] = 1 << 30
    return forge.seal()


# --- FORMAT 3.3: config ----------------------------------------------------------------------------------


def _with_config(forge: Forge, **fields: Any) -> str:
    forge.replace("config.json", json.dumps(LLAMA | fields).encode())
    return forge.seal()


@attack("config-malformed")
def config_is_no_json(forge: Forge) -> str:
    forge.replace("config.json", b"model_type: llama")
    return forge.seal()


@attack("config-malformed")
def config_is_a_list(forge: Forge) -> str:
    forge.replace("config.json", b"[]")
    return forge.seal()


@attack("config-malformed")
def config_with_a_key_twice(forge: Forge) -> str:
    forge.replace("config.json", b'{"model_type":"llama","model_type":"opt"}')
    return forge.seal()


@attack("config-malformed")
def config_with_infinity(forge: Forge) -> str:
    return _with_config(forge, rms_norm_eps=float("inf"))


@attack("config-malformed")
def config_with_a_number_that_becomes_infinity(forge: Forge) -> str:
    forge.replace("config.json", b'{"rms_norm_eps":1e999}')
    return forge.seal()


@attack("config-malformed")
def config_nested_a_million_deep(forge: Forge) -> str:
    forge.replace("config.json", b'{"a":' * 1_000_000)
    return forge.seal()


@attack("config-malformed")
def config_nested_a_little_too_deep(forge: Forge) -> str:
    return _with_config(forge, rope_scaling={"a": {"b": {"c": {"d": {"e": 1}}}}})


@attack("config-malformed")
def config_with_a_long_text(forge: Forge) -> str:
    return _with_config(forge, hidden_act="x" * 10_000)


@attack("config-malformed")
def config_of_nine_megabytes(forge: Forge) -> str:
    forge.replace("config.json", b" " * (9 << 20))
    return forge.seal()


@attack("config-malformed")
def tokenizer_config_is_no_json(forge: Forge) -> str:
    forge.rename("LICENSE", "tokenizer_config.json")
    return forge.seal()


@attack("config-key")
def config_with_code(forge: Forge) -> str:
    return _with_config(forge, auto_map={"AutoModelForCausalLM": "evil--modeling.Model"})


@attack("config-key")
def config_with_kernels_from_a_hub(forge: Forge) -> str:
    return _with_config(forge, attn_implementation="someone/kernels")


@attack("config-key")
def config_that_is_already_quantized(forge: Forge) -> str:
    return _with_config(forge, quantization_config={"quant_method": "gptq"})


@attack("config-key")
def tokenizer_config_with_code(forge: Forge) -> str:
    forge.rename("LICENSE", "tokenizer_config.json")
    forge.replace("tokenizer_config.json", b'{"auto_map":{"AutoTokenizer":["evil.Tokenizer",null]}}')
    return forge.seal()


@attack("config-model")
def config_of_an_unknown_family(forge: Forge) -> str:
    return _with_config(forge, model_type="mamba")


@attack("config-model")
def family_is_not_the_configs(forge: Forge) -> str:
    forge.manifest["model"]["family"] = "mistral"
    return forge.seal()


@attack("config-model")
def config_without_sizes(forge: Forge) -> str:
    forge.replace("config.json", b'{"model_type":"llama"}')
    return forge.seal()


@attack("config-model")
def config_with_a_billion_layers(forge: Forge) -> str:
    return _with_config(forge, num_hidden_layers=10**9)


# --- FORMAT 4.1: container -------------------------------------------------------------------------------


def _with_header(forge: Forge, role: str, header: bytes) -> str:
    forge.replace(role, container_bytes(header, bytes(forge.container(role).body)))
    return forge.seal()


def _with_entry(forge: Forge, role: str, **fields: Any) -> str:
    """Another entry for the layer's first tensor by name."""
    container = forge.container(role)
    name = next(name for name in sorted(container.entries) if name != "__metadata__")
    container.entries[name] = {**container.entries[name], **fields}
    forge.replace(role, container.data())
    return forge.seal()


@attack("header-size")
def header_longer_than_eight_megabytes(forge: Forge) -> str:
    size = MAX_HEADER_BYTES + 8
    forge.replace("plain", size.to_bytes(8, "little") + b" " * size)
    return forge.seal()


@attack("header-size")
def header_longer_than_the_file(forge: Forge) -> str:
    data = forge.layers["mask"]
    forge.replace("mask", len(data).to_bytes(8, "little") + data[8:])
    return forge.seal()


@attack("header-size")
def header_of_nearly_all_of_64_bits(forge: Forge) -> str:
    forge.replace("mask", (2**64 - 8).to_bytes(8, "little") + forge.layers["mask"][8:])
    return forge.seal()


@attack("header-size")
def file_shorter_than_a_header_length(forge: Forge) -> str:
    forge.replace("plain", b"short")
    return forge.seal()


@attack("header-size")
def header_with_a_cavity_of_spaces(forge: Forge) -> str:
    return _with_header(forge, "mask", canonical_json(forge.container("mask").entries) + b" " * 64)


@attack("json-malformed")
def header_with_a_tensor_twice(forge: Forge) -> str:
    data = canonical_json(forge.container("mask").entries)
    again = data[data.index(b'"model.layers.1.self_attn.v_proj') : -1]
    return _with_header(forge, "mask", data[:-1] + b"," + again + b"}")


@attack("json-not-canonical")
def header_in_another_order(forge: Forge) -> str:
    entries = forge.container("mask").entries
    backwards = dict(sorted(entries.items(), reverse=True))
    return _with_header(forge, "mask", json.dumps(backwards, separators=(",", ":")).encode())


@attack("json-malformed")
def header_is_a_pickle(forge: Forge) -> str:
    return _with_header(forge, "mask", b"\x80\x04\x95cposix\nsystem\n")


@attack("header-schema")
def header_is_a_list(forge: Forge) -> str:
    return _with_header(forge, "mask", b"[]")


@attack("header-schema")
def header_with_other_metadata(forge: Forge) -> str:
    container = forge.container("mask")
    container.entries["__metadata__"] = {"format": "pt", "note": "hidden"}
    forge.replace("mask", container.data())
    return forge.seal()


@attack("header-schema")
def entry_with_an_unknown_key(forge: Forge) -> str:
    return _with_entry(forge, "mask", stride=[1])


@attack("header-schema")
def shape_with_a_negative_size(forge: Forge) -> str:
    return _with_entry(forge, "mask", shape=[-1, -5])


@attack("header-schema")
def shape_with_a_boolean(forge: Forge) -> str:
    return _with_entry(forge, "mask", shape=[5, True])


@attack("header-schema")
def shape_of_a_hundred_dimensions(forge: Forge) -> str:
    return _with_entry(forge, "mask", shape=[5] + [1] * 99)


@attack("header-schema")
def offsets_of_three(forge: Forge) -> str:
    return _with_entry(forge, "mask", data_offsets=[0, 20, 20])


@attack("header-dtype")
def mask_of_signed_indices(forge: Forge) -> str:
    return _with_entry(forge, "mask", dtype="I32")


@attack("header-dtype")
def dtype_is_a_list(forge: Forge) -> str:
    return _with_entry(forge, "mask", dtype=["U32"])


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


@attack("header-overflow")
def shape_whose_product_wraps_to_the_right_size(forge: Forge) -> str:
    # 2^62 * 4 bytes is 0 modulo 2^64.
    return _with_entry(forge, "mask", shape=[2**62], data_offsets=[0, 0])


@attack("header-overflow")
def tensor_of_five_terabytes(forge: Forge) -> str:
    return _with_entry(forge, "mask", shape=[5 << 38], data_offsets=[0, 5 << 40])


@attack("header-offsets")
def tensor_shorter_than_its_shape(forge: Forge) -> str:
    return _with_entry(forge, "mask", shape=[6])


@attack("header-offsets")
def tensors_that_overlap(forge: Forge) -> str:
    container = forge.container("mask")
    first, second = sorted(name for name in container.entries if name != "__metadata__")[:2]
    container.entries[second]["data_offsets"] = container.entries[first]["data_offsets"]
    forge.replace("mask", container.data())
    return forge.seal()


@attack("header-offsets")
def hole_before_the_first_tensor(forge: Forge) -> str:
    container = forge.container("mask")
    for name, entry in container.entries.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    container.body = bytearray(8) + container.body
    forge.replace("mask", container.data())
    return forge.seal()


@attack("header-offsets")
def offsets_that_run_backwards(forge: Forge) -> str:
    return _with_entry(forge, "mask", data_offsets=[20, 0])


@attack("header-offsets")
def floats_behind_bytes(forge: Forge) -> str:
    container = forge.container("dense")
    codes, scales = container.entries[Q0], container.entries[f"{Q0}.absmax"]
    size = scales["data_offsets"][1] - scales["data_offsets"][0]
    container.entries = {"__metadata__": container.entries["__metadata__"], "a": codes, "b": scales}
    end = codes["data_offsets"][1] - codes["data_offsets"][0]
    container.entries["a"] = {**codes, "data_offsets": [0, end]}
    container.entries["b"] = {**scales, "data_offsets": [end, end + size]}
    forge.replace("dense", container.data())
    return forge.seal()


@attack("layer-file-size")
def bytes_behind_the_last_tensor(forge: Forge) -> str:
    container = forge.container("mask")
    container.body += b"tail"
    forge.replace("mask", container.data())
    return forge.seal()


@attack("layer-file-size")
def last_tensor_is_cut(forge: Forge) -> str:
    container = forge.container("plain")
    del container.body[-4:]
    forge.replace("plain", container.data())
    return forge.seal()


# --- FORMAT 4.2 to 4.6: what layers hold ----------------------------------------------------------------


def _with_number(forge: Forge, role: str, name: str, dtype: str, at: int, value: float) -> str:
    container = forge.container(role)
    container.view(name, dtype)[at] = value
    forge.replace(role, container.data())
    return forge.seal()


@attack("dense-scales")
def scale_is_infinite(forge: Forge) -> str:
    return _with_number(forge, "dense", f"{Q0}.absmax", "<f4", 3, np.inf)


@attack("dense-scales")
def scale_is_nan(forge: Forge) -> str:
    return _with_number(forge, "dense", f"{Q0}.absmax", "<f4", 0, np.nan)


@attack("dense-scales")
def scale_is_negative(forge: Forge) -> str:
    return _with_number(forge, "dense", f"{Q0}.absmax", "<f4", -1, -0.25)


@attack("dense-code-book")
def table_with_another_number(forge: Forge) -> str:
    return _with_number(forge, "dense", f"{Q0}.quant_map", "<f4", 15, 1e30)


@attack("dense-code-book")
def state_with_another_shape(forge: Forge) -> str:
    container = forge.container("dense")
    state = container.view(f"{Q0}.quant_state.bitsandbytes__nf4", "u1")
    state[:] = np.frombuffer(state.tobytes().replace(b"[32, 32]", b"[16, 64]"), np.uint8)
    forge.replace("dense", container.data())
    return forge.seal()


@attack("dense-padding")
def hidden_bits_in_the_last_nibble(forge: Forge) -> str:
    odd = LLAMA | {
        "hidden_size": 9,
        "intermediate_size": 7,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    other = Forge(write_tiny(forge.tiny.blobs, config=odd), forge.target)
    container = other.container("dense")
    container.view(Q0, "u1")[-1] |= 1
    other.replace("dense", container.data())
    return other.seal()


@attack("plain-not-finite")
def embedding_with_nan(forge: Forge) -> str:
    return _with_number(forge, "plain", "model.embed_tokens.weight", "<f4", 7, np.nan)


@attack("plain-not-finite")
def norm_with_infinity(forge: Forge) -> str:
    return _with_number(forge, "plain", "model.norm.weight", "<f4", -1, -np.inf)


@attack("mask-order")
def index_twice(forge: Forge) -> str:
    container = forge.container("mask")
    indices = container.view(Q0, "<u4")
    indices[2] = indices[1]
    forge.replace("mask", container.data())
    return forge.seal()


@attack("mask-order")
def indices_that_fall(forge: Forge) -> str:
    container = forge.container("mask")
    indices = container.view(Q0, "<u4")
    indices[:] = indices[::-1].copy()
    forge.replace("mask", container.data())
    return forge.seal()


@attack("mask-range")
def index_behind_the_weight(forge: Forge) -> str:
    return _with_number(forge, "mask", Q0, "<u4", -1, 32 * 32)


@attack("mask-range")
def index_of_all_ones(forge: Forge) -> str:
    return _with_number(forge, "mask", Q0, "<u4", -1, 2**32 - 1)


@attack("values-not-finite")
def value_is_nan(forge: Forge) -> str:
    return _with_number(forge, "values", Q0, "<f4", 0, np.nan)


@attack("tensor-names")
def tensor_under_another_name(forge: Forge) -> str:
    container = forge.container("plain")
    container.entries["lm_head.bias"] = container.entries.pop("lm_head.weight")
    forge.replace("plain", container.data())
    return forge.seal()


@attack("tensor-names")
def masked_tensor_is_missing(forge: Forge) -> str:
    container = forge.container("values")
    last = max(
        (name for name in container.entries if name != "__metadata__"),
        key=lambda name: container.entries[name]["data_offsets"][0],
    )
    begin, _ = container.entries.pop(last)["data_offsets"]
    del container.body[begin:]
    forge.replace("values", container.data())
    return forge.seal()


@attack("tensor-shape")
def transposed_embedding(forge: Forge) -> str:
    container = forge.container("plain")
    container.entries["model.embed_tokens.weight"]["shape"].reverse()
    forge.replace("plain", container.data())
    return forge.seal()


@attack("tensor-shape")
def counts_moved_from_one_tensor_to_the_next(forge: Forge) -> str:
    forge.manifest["tensors"][0]["count"] += 1
    forge.manifest["tensors"][1]["count"] -= 1
    return forge.seal()


@attack("tensor-shape")
def tensors_in_another_order(forge: Forge) -> str:
    forge.manifest["tensors"].reverse()
    return forge.seal()


@attack("tensor-shape")
def config_of_a_wider_model(forge: Forge) -> str:
    return _with_config(forge, intermediate_size=64)


# --- FORMAT 4.6: exponents -------------------------------------------------------------------------------


@attack("manifest-layers")
def exponents_twice(forge: Forge) -> str:
    forge.manifest["layers"].insert(5, forge.entry("exponents"))
    return forge.seal()


@attack("manifest-layers")
def exponents_before_the_values(forge: Forge) -> str:
    layers = forge.manifest["layers"]
    layers[3], layers[4] = layers[4], layers[3]
    return forge.seal()


@attack("manifest-schema")
def exponents_with_the_media_type_of_values(forge: Forge) -> str:
    forge.entry("exponents")["media_type"] = forge.entry("values")["media_type"]
    return forge.seal()


@attack("layer-path")
def exponents_with_a_path(forge: Forge) -> str:
    forge.entry("exponents")["path"] = "config.json"
    return forge.seal()


@attack("layer-size")
def exponents_heavier_than_their_header_allows(forge: Forge) -> str:
    forge.entry("exponents")["size_bytes"] = forge.manifest["mask"]["k"] + MAX_HEADER_BYTES + 9
    return forge.seal()


@attack("layer-size")
def exponents_lighter_than_a_byte_a_weight(forge: Forge) -> str:
    forge.entry("exponents")["size_bytes"] = forge.manifest["mask"]["k"] - 1
    return forge.seal()


@attack("blob-digest")
def one_bit_of_the_exponents_is_flipped(forge: Forge) -> str:
    digest = forge.seal()
    data = forge.layers["exponents"]
    forge.overwrite(forge.entry("exponents")["digest"], data[:-1] + bytes([data[-1] ^ 1]))
    return digest


@attack("header-dtype")
def exponents_without_a_sign(forge: Forge) -> str:
    return _with_entry(forge, "exponents", dtype="U8")


@attack("exponents-range")
def exponent_that_shifts_by_sixteen(forge: Forge) -> str:
    return _with_number(forge, "exponents", Q0, "i1", 2, 16)


@attack("exponents-range")
def exponent_that_shifts_backwards(forge: Forge) -> str:
    return _with_number(forge, "exponents", Q0, "i1", 2, -1)


@attack("exponents-range")
def exponents_that_do_not_begin_at_zero(forge: Forge) -> str:
    container = forge.container("exponents")
    np.frombuffer(container.body, np.int8)[:] = 1
    forge.replace("exponents", container.data())
    return forge.seal()


@attack("tensor-shape")
def exponents_of_one_weight_less(forge: Forge) -> str:
    forge.rewrite("exponents", Q0, "I8", np.ones(4, np.int8))
    # The layer must weigh a byte for each masked weight, so the missing one is added elsewhere.
    forge.rewrite("exponents", Q0.replace("q_proj", "k_proj"), "I8", np.ones(6, np.int8))
    return forge.seal()


@attack("tensor-shape")
def exponents_of_two_dimensions(forge: Forge) -> str:
    return _with_entry(forge, "exponents", shape=[5, 1])


@attack("tensor-names")
def exponents_of_another_tensor(forge: Forge) -> str:
    container = forge.container("exponents")
    container.entries["lm_head.weight"] = container.entries.pop(Q0)
    forge.replace("exponents", container.data())
    return forge.seal()


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
    assert verify_package(forge.target, tiny.digest).k == tiny.manifest.mask.k


@pytest.mark.parametrize(("code", "build"), ATTACKS, ids=[build.__name__ for _, build in ATTACKS])
def test_reader_refuses(code: str, build: Attack, forge: Forge) -> None:
    with pytest.raises(PackageError) as refused:
        verify_package(forge.target, build(forge))
    assert refused.value.code == code


@pytest.mark.parametrize(("code", "manifest"), PLAN_ATTACKS, ids=[code for code, _ in PLAN_ATTACKS])
def test_plan_refuses_before_a_download(code: str, manifest: bytes) -> None:
    with pytest.raises(PackageError) as refused:
        check_plan(manifest, digest_of(manifest), 1 << 40)
    assert refused.value.code == code
