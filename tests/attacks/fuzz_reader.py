"""Fuzz the package reader: `python -m tests.attacks.fuzz_reader --minutes 10`.

Each attempt takes a good package and changes a few things at random: bytes, JSON values, entries of headers,
numbers of tensors. It corrects digests and sizes, so that the change reaches the later checks, and opens the
package. The reader may accept it or refuse it with a `PackageError` of a documented code. Anything else is a
crash: the seed and the number of the attempt are printed. The same command with `--seed` and `--only` repeats
it.

The program prints the number of attempts, the refusals by code, and the slowest. It exits with 1 after a
crash.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Protocol

from permille.choices import AdapterKind
from permille.digests import JSON, canonical_json, digest_of, parse_canonical
from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenAdapter
from permille.package.limits import BLOCK_BYTES, BLOCKED_ROLES
from permille.package.reader import verify_package
from permille.quantization.types import Scheme
from tests.attacks.forge import Container
from tests.unit.package.tiny import LLAMA, WIDE, Tiny, write_tiny

ODD = {"hidden_size": 9, "intermediate_size": 7, "num_attention_heads": 1, "num_key_value_heads": 1}
LORA = ChosenAdapter(kind=AdapterKind.LORA, rank=2, alpha=4, scope="attention", seed=1)
ROLES = ("dense", "plain", "mask", "values", "adapter")
INTERESTING: tuple[JSON, ...] = (
    *(None, True, False, "", "\0", "../x", "sha256:" + "0" * 64, "nf4", "F32", "BF16", "I64", [], {}, [1, 2]),
    *(0, 1, -1, 7, 8, 9, 63, 64, 255, *(2**n for n in (15, 16, 31, 32, 53, 62))),
    *(2**31 - 1, 2**32 - 1, 2**63 - 1),
    *("model.norm.weight", "config.json", "x" * 300, {"a": {"b": {"c": [[[0]]]}}}),
)
CONFIG_INTERESTING = (*INTERESTING, 0.5, -1e308, 1e308, 5e-324)


@dataclass(slots=True)
class Parts:
    """A package as the fuzzer changes it."""

    manifest: bytes
    layers: dict[str, bytes]


@dataclass(slots=True)
class Tally:
    """The results so far."""

    attempts: int = 0
    slowest_s: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)


class Fuzzer(Protocol):
    """Attempts that are functions of a seed and of their number."""

    tally: Tally

    def attempt(self, number: int) -> str:
        """Make one attempt and return its outcome. A crash raises."""
        ...


class ReaderFuzzer:
    """Attempts below one folder. Each is a function of the seed and of its number."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.blobs = BlobFolder(folder)
        self.tally = Tally()
        self.models = [
            _parts(write_tiny(self.blobs)),
            _parts(write_tiny(self.blobs, scheme=Scheme.INT4, dtype="BF16")),
            _parts(write_tiny(self.blobs, config=LLAMA | ODD, dtype="F16")),
            _parts(write_tiny(self.blobs, adapter=LORA)),
            _parts(write_tiny(self.blobs, config=WIDE, scheme=Scheme.SOURCE)),
        ]

    def attempt(self, number: int) -> str:
        """Forge one package and open it. Return "accepted" or the code of the refusal. A crash raises."""
        return self.open(self.forge(Random(f"{self.seed}:{number}")))

    def forge(self, random: Random) -> Parts:
        """Return a good package with one to three changes."""
        model = random.choice(self.models)
        parts = Parts(manifest=model.manifest, layers=dict(model.layers))
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            random.choice(CHANGES)(parts, random)
        if random.random() < 0.95:  # otherwise the old hashes reveal the change of a layer
            hashes = [one for role in BLOCKED_ROLES for one in _hashes(parts.layers[role.value])]
            _replace(parts, "blocks", b"".join(hashes))
        if random.random() < 0.1:
            parts.manifest = damaged(parts.manifest, random)
        return parts

    def open(self, parts: Parts) -> str:
        """Store the package and verify it."""
        blobs = {digest_of(data): data for data in (parts.manifest, *parts.layers.values())}
        forged = [self.blobs.path(digest) for digest in blobs if not self.blobs.has(digest)]
        for path in forged:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(blobs[f"sha256:{path.name}"])
        started = time.perf_counter()
        try:
            verify_package(self.blobs, digest_of(parts.manifest))
            outcome = "accepted"
        except PackageError as exc:
            outcome = exc.code
        for path in forged:
            path.unlink()
        self.tally.slowest_s = max(self.tally.slowest_s, time.perf_counter() - started)
        self.tally.attempts += 1
        self.tally.codes[outcome] += 1
        return outcome


# --- changes ---------------------------------------------------------------------------------------------


def change_manifest(parts: Parts, random: Random) -> None:
    """Change a value somewhere in the manifest."""
    parts.manifest = _encoded(parts.manifest, lambda value: changed(value, random, INTERESTING))


def change_config(parts: Parts, random: Random) -> None:
    """Change a value in config.json, or damage its bytes."""
    data = parts.layers["config.json"]
    try:
        config = changed(json.loads(data), random, CONFIG_INTERESTING)
    except (ValueError, RecursionError):  # an earlier change left no valid JSON
        config = None
    if config is None or random.random() < 0.3:
        _replace(parts, "config.json", damaged(data, random))
    else:
        _replace(parts, "config.json", json.dumps(config).encode())


def change_header(parts: Parts, random: Random) -> None:
    """Change a value in the header of a layer."""
    role = random.choice([role for role in ROLES if role in parts.layers])
    container = _container(parts, role)
    if container is not None:
        container.entries = changed(container.entries, random, INTERESTING)
        _replace(parts, role, container.data())


def change_numbers(parts: Parts, random: Random) -> None:
    """Change bits in the tensors of a layer."""
    role = random.choice([role for role in ROLES if role in parts.layers])
    container = _container(parts, role)
    if container is not None and container.body:
        for _ in range(random.choice((1, 4, 16))):
            at = random.randrange(len(container.body))
            bits = random.choice((b"\xff" * 4, b"\0\0\x80\x7f", random.randbytes(4)))
            container.body[at : at + 4] = bits[: len(container.body) - at]
        _replace(parts, role, container.data())


def change_layer(parts: Parts, random: Random) -> None:
    """Damage a layer anywhere, including its length field."""
    name = random.choice(sorted(parts.layers))
    _replace(parts, name, damaged(parts.layers[name], random))


CHANGES = (change_manifest, change_config, change_header, change_header, change_numbers, change_layer)


def damaged(data: bytes, random: Random) -> bytes:
    """Replace, remove, repeat, insert or cut bytes."""
    at = random.randrange(len(data) + 1)
    size = random.choice((1, 1, 2, 8, 64))
    match random.randrange(5):
        case 0:
            return data[:at] + random.randbytes(min(size, len(data) - at)) + data[at + size :]
        case 1:
            return data[:at] + data[at + size :]
        case 2:
            return data[:at] + data[max(0, at - size) : at] + data[at:]
        case 3:
            planted = random.choice((b"[" * 5000, b'"', b"\\ud800", b"9" * 30, b"1e999", b"\0"))
            return data[:at] + planted + data[at:]
        case _:
            return data[:at]


def changed(value: Any, random: Random, interesting: tuple[Any, ...]) -> Any:
    """Return a copy of a JSON value with one node replaced, removed, copied or renamed."""
    if isinstance(value, Mapping) and value and random.random() < 0.9:
        key = random.choice(sorted(value))
        if random.random() < 0.15:
            rest = {name: item for name, item in value.items() if name != key}
            renamed = {random.choice(("x", "a.weight", f"{key}s")): value[key]}
            return rest if random.random() < 0.5 else rest | renamed
        return {**value, key: changed(value[key], random, interesting)}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        if random.random() < 0.15:
            return value[:at] + value[at + 1 :] if random.random() < 0.5 else [*value, value[at]]
        return [*value[:at], changed(value[at], random, interesting), *value[at + 1 :]]
    if isinstance(value, int) and random.random() < 0.5:
        return value + random.choice((-8, -2, -1, 1, 2, 8))
    return random.choice(interesting)


def _encoded(data: bytes, change: Callable[[JSON], JSON]) -> bytes:
    try:
        return canonical_json(change(parse_canonical(data, len(data))))
    except (PackageError, ValueError, TypeError):
        return data


def _container(parts: Parts, role: str) -> Container | None:
    try:
        return Container(parts.layers[role])
    except (PackageError, AssertionError):
        return None


def _hashes(data: bytes) -> list[bytes]:
    return [sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]


def _replace(parts: Parts, name: str, data: bytes) -> None:
    """Replace the bytes of a layer. Correct its digest and size in the manifest if they can be found."""
    old, new = digest_of(parts.layers[name]), digest_of(data)
    old_size, new_size = len(parts.layers[name]), len(data)
    parts.layers[name] = data
    manifest = parts.manifest.replace(old.encode(), new.encode())
    head, found, tail = manifest.partition(f'"digest":"{new}"'.encode())
    sized = tail.replace(f'"size_bytes":{old_size}}}'.encode(), f'"size_bytes":{new_size}}}'.encode(), 1)
    parts.manifest = head + found + sized


def _parts(tiny: Tiny) -> Parts:
    layers = {
        layer.path or layer.role.value: tiny.blobs.read(layer.digest, limit=1 << 26)
        for layer in tiny.manifest.layers
    }
    return Parts(manifest=tiny.manifest.to_bytes(), layers=layers)


# --- command line ----------------------------------------------------------------------------------------


def run(fuzzer: Fuzzer, *, first: int, attempts: int | None, until: float) -> int | None:
    """Run `attempts` attempts from number `first`, or until a time. Return the number of one that crashed."""
    number = first
    while (attempts is None or number < first + attempts) and time.monotonic() < until:
        try:
            fuzzer.attempt(number)
        except Exception:  # noqa: BLE001 - a crash is what this program looks for
            traceback.print_exc()
            return number
        number += 1
    return None


def main(name: str, description: str | None, make: Callable[[Path, int], Fuzzer]) -> int:
    """Parse the command line and fuzz. Return the exit code."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this attempt alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        fuzzer = make(Path(folder), options.seed)
        crashed = run(
            fuzzer,
            first=options.only or 0,
            attempts=None if options.only is None else 1,
            until=time.monotonic() + options.minutes * 60,
        )
    tally = fuzzer.tally
    for code, count in tally.codes.most_common():
        print(f"{count:9} {code}")
    print(f"{name}: {tally.attempts} attempts, slowest {tally.slowest_s:.3f} s", end=", ")
    print("no crash" if crashed is None else f"CRASH at --seed {options.seed} --only {crashed}")
    return 0 if crashed is None else 1


if __name__ == "__main__":
    sys.exit(main("fuzz_reader", __doc__, ReaderFuzzer))
