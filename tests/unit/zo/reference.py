"""Slow, obvious versions of what `permille.zo` computes. They follow FORMAT.md and share no code with it.

`read_log`, `state` and `state_digest` together are an independent replay, from a log's bytes to its state
digest. `round_bytes` and `audit` do the same for rounds.
"""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

Header = Mapping[str, Any]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return Philox4x32-10 of a counter, on Python integers (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 % 2**32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def sign(seed: int, step: int, query: int, tensor_id: int, rank: int) -> int:
    """Return one element of a direction, by FORMAT 6.2 and 6.3."""
    words = philox([rank // 128, tensor_id, step, query], [seed % 2**32, seed // 2**32])
    return 2 * ((words[rank % 128 // 32] >> (rank % 32)) & 1) - 1


def z(header: Header, step: int, query: int) -> list[int]:
    """Return a whole direction in flat order, by FORMAT 6.3 to 6.6 and 8.1."""
    seed, counts, split = int(header["seed"], 16), header["counts"], header["split"]
    places = [(tensor, rank) for tensor in range(len(counts)) for rank in range(counts[tensor])]
    if header["directions"] == "groups":
        standing = [group_and_sign(seed, step, header["queries"], *place) for place in places]
        found = [one if group == query else 0 for group, one in standing]
    else:
        found = [sign(seed, step, query, *place) for place in places]
    still = sum(counts[: header["first_tensor"]])
    found = [0 if index < still else value for index, value in enumerate(found)]
    if split is not None:
        below = sum(counts[: split["first_upper_tensor"]])
        lower = query < split["lower_queries"]
        found = [value if (index < below) == lower else 0 for index, value in enumerate(found)]
    return found


def group_and_sign(seed: int, step: int, groups: int, tensor_id: int, rank: int) -> tuple[int, int]:
    """Return a weight's group and sign in one step, by FORMAT 6.6."""
    word = philox([rank // 4, tensor_id, step, 2**32 - 1], [seed % 2**32, seed // 2**32])[rank % 4]
    return word % 2**31 * groups // 2**31, 1 if word >= 2**31 else -1


def state(header: Header, rows: Sequence[Sequence[int]], start: int = 0) -> list[int]:
    """Return the state of these coefficients on Python integers, by FORMAT 7.5."""
    total = [0] * sum(header["counts"])
    for row, coefficients in enumerate(rows):
        for query, c in enumerate(coefficients):
            if c:
                direction = z(header, start + row, query)
                total = [s + c * element for s, element in zip(total, direction, strict=True)]
    return total


def state_digest(header: Header, s: Sequence[int]) -> str:
    """Return the digest of a state, by FORMAT 10."""
    data = b"permille-state-1\0" + header["mask_digest"].encode() + b"\0"
    data += struct.pack("<i", header["step_unit_exponent"]) + struct.pack(f"<{len(s)}q", *s)
    return "sha256:" + hashlib.sha256(data).hexdigest()


def write_log(header: Header, rows: Sequence[Sequence[int]], flags: Mapping[int, int]) -> bytes:
    """Return a canonical log, by FORMAT 9.1 and 9.2."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    head = b"PMLLOG1\n" + struct.pack("<I", len(text)) + text + struct.pack("<I", len(rows))
    crc = zlib.crc32(head)
    data = head + struct.pack("<I", crc)
    for first in range(0, len(rows), 1024):
        chunk = rows[first : first + 1024]
        flagged = {step - first: flag for step, flag in flags.items() if first <= step < first + len(chunk)}
        numbers = [len(flagged), *(n for step in sorted(flagged) for n in (step, flagged[step]))]
        numbers += [2 * c if c >= 0 else -2 * c - 1 for row in chunk for c in row]
        payload = b"".join(_varint(number) for number in numbers)
        sized = struct.pack("<I", len(payload)) + payload
        crc = zlib.crc32(sized, crc)
        data += sized + struct.pack("<I", crc)
    return data


def read_log(data: bytes) -> tuple[dict[str, Any], list[list[int]]]:
    """Return header and coefficients of a canonical log, by FORMAT 9. Checks checksums, but no limits."""
    (size,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[12 : 12 + size])
    at = 12 + size
    steps, stored = struct.unpack_from("<II", data, at)
    crc = zlib.crc32(data[: at + 4])
    assert data[:8] == b"PMLLOG1\n"
    assert stored == crc
    at += 8
    rows: list[list[int]] = []
    while len(rows) < steps:
        (size,) = struct.unpack_from("<I", data, at)
        numbers = _numbers(data[at + 4 : at + 4 + size])
        crc = zlib.crc32(data[at : at + 4 + size], crc)
        assert struct.unpack_from("<I", data, at + 4 + size)[0] == crc
        at += 8 + size
        signed = [n // 2 if n % 2 == 0 else -(n + 1) // 2 for n in numbers[1 + 2 * numbers[0] :]]
        queries = header["queries"]
        rows += [signed[first : first + queries] for first in range(0, len(signed), queries)]
    assert at == len(data)
    return header, rows


def read_state(data: bytes) -> tuple[dict[str, Any], list[int]]:
    """Return header and integers of a packed state, by FORMAT 11. Checks the digest, but no limits."""
    assert data[:8] == b"PMLSTA1\n"
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    (size,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[12 : 12 + size])
    at = 12 + size
    s: list[int] = []
    while len(s) < header["k"]:
        count, width = min(4096, header["k"] - len(s)), data[at]
        size = -(-count * width // 8)
        bits = int.from_bytes(data[at + 1 : at + 1 + size], "little")
        zigzags = [bits >> index * width & 2**width - 1 for index in range(count)]
        s += [n // 2 if n % 2 == 0 else -(n + 1) // 2 for n in zigzags]
        at += 1 + size
    assert at == len(data) - 32
    return header, s


def round_bytes(definition: Header, number: int, devices: Sequence[Mapping[str, Any]]) -> bytes:
    """Return one round by FORMAT 13.3. A device has `weight` and `rows`, its integers by step."""
    log, steps = definition["log"], definition["steps"]
    weights, rows = [0] * steps, [[0] * log["queries"] for _ in range(steps)]
    for step in range(steps):
        given: dict[int, list[tuple[int, int]]] = {query: [] for query in range(log["queries"])}
        for device in devices:
            squares = sum(c * c for row in device["rows"] for c in row)
            if step < len(device["rows"]):
                weights[step] += device["weight"]
                for query, c in enumerate(device["rows"][step]):
                    if definition["clip"] is not None and squares > definition["clip"] ** 2:
                        shorter = abs(c) * definition["clip"] // (math.isqrt(squares) + 1)
                        c = shorter if c > 0 else -shorter
                    given[query].append((c, device["weight"]))
        for query, pairs in given.items():
            share = Fraction(2) ** (definition["guard_bits"] + definition["rate_shift"])
            if definition["rule"] == "trimmed":
                cut = min(len(pairs) * definition["trim_percent"] // 100, max(0, len(pairs) - 1) // 2)
                pairs = sorted(pairs)[cut : len(pairs) - cut]
                total = len(pairs)
            else:
                total = weights[step]
            if total:
                rows[step][query] = round(share * sum(c * w for c, w in pairs) / total)
    numbers = weights + [2 * u if u >= 0 else -2 * u - 1 for row in rows for u in row]
    payload = b"".join(_varint(number) for number in numbers)
    return struct.pack("<II", number, len(payload)) + payload


def audit(definition: bytes, segment: bytes) -> tuple[str, list[int]]:
    """Return chain and state after the rounds of a segment from round 0, by FORMAT 13.3 and 13.4."""
    fields = json.loads(definition)
    log = fields["log"]
    chain = "sha256:" + hashlib.sha256(definition).hexdigest()
    s = [0] * sum(log["counts"])
    at = 0
    while at < len(segment):
        number, size = struct.unpack_from("<II", segment, at)
        zigzags = _numbers(segment[at + 8 : at + 8 + size])[fields["steps"] :]
        signed = [n // 2 if n % 2 == 0 else -(n + 1) // 2 for n in zigzags]
        rows = [signed[first : first + log["queries"]] for first in range(0, len(signed), log["queries"])]
        moved = state(log, rows, start=number * fields["steps"])
        s = [old + new for old, new in zip(s, moved, strict=True)]
        hashed = b"permille-round-1\0" + chain.encode() + segment[at : at + 8 + size]
        chain = "sha256:" + hashlib.sha256(hashed + state_digest(log, s).encode()).hexdigest()
        at += 8 + size
    return chain, s


def _varint(number: int) -> bytes:
    parts = []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def _numbers(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        number += byte % 128 << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number, shift = 0, 0
    return numbers
