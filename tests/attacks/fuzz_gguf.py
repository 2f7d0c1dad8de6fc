"""Fuzz the reader of GGUF files: `python -m tests.attacks.fuzz_gguf --minutes 10`.

Each attempt takes the small file of a random model and changes a few things at random: values, types and
lengths of metadata, descriptions of tensors, any bytes. It then does what `permille models add` and the first
job do with a file. The file may be converted or refused with an `InputError`. If it is converted, an engine
must be able to open the model. Anything else is a crash: the seed and the number of the attempt are printed.
The same command with `--seed` and `--only` repeats it.

The program prints the number of attempts, how many were converted, and the slowest. It exits with 1 after a
crash.
"""

import shutil
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from permille.errors import InputError
from permille.models.architecture import architecture_of
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.gguf.codes import KeptModel
from permille.models.gguf.file import GgufFile
from permille.models.gguf.folder import model_folder
from permille.quantization import dequantize
from permille.quantization.gguf_blocks import TYPES
from tests.attacks.fuzz_reader import Tally, main
from tests.unit.engines.gguf_packages import exported_package, sentencepiece_tokenizer
from tests.unit.models.gguf_files import coded, written

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    31,
    32,
    33,
    255,
    *(2**n + d for n in (15, 16, 31, 32, 40, 63) for d in (-1, 0)),
)
FLOATS = (0.0, -1.0, 1e-38, 1e38, float("inf"), float("nan"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A valid file.

    Attributes:
        header: Number of bytes before the first tensor.
        places: Offsets where values begin. Four bytes before each is a type or a count: of the header's two
            counts, the metadata's values, and the tensors' dimensions.
    """

    data: bytes
    header: int
    places: tuple[int, ...]


class GgufFuzzer:
    """Attempts below one folder. Each is a function of the seed and of its number."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.tally = Tally()
        self._folder = folder
        self._seeds = [_seed(path) for path in _files(folder / "seeds")]

    def attempt(self, number: int) -> str:
        """Forge one file and use it. Return "converted" or "refused". A crash raises."""
        path = self._folder / "forged.gguf"
        path.write_bytes(self.forge(Random(f"{self.seed}:{number}")))
        started = time.perf_counter()
        try:
            use(path, self._folder / "root")
            outcome = "converted"
        except InputError:
            outcome = "refused"
        shutil.rmtree(self._folder / "root", ignore_errors=True)
        self.tally.slowest_s = max(self.tally.slowest_s, time.perf_counter() - started)
        self.tally.attempts += 1
        self.tally.codes[outcome] += 1
        return outcome

    def forge(self, random: Random) -> bytes:
        """Return a valid file with one to three changes."""
        seed = random.choice(self._seeds)
        data = bytearray(seed.data)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            random.choice((change_value, change_value, change_bytes, change_size))(data, seed, random)
        return bytes(data)


def use(path: Path, root: Path) -> None:
    """Convert a file, open the result, and decode the weights that the scheme `source` keeps.

    Raises:
        InputError: The file is refused.
    """
    checkpoint = Checkpoint(model_folder(path, root))
    architecture_of(checkpoint.config)
    kept = KeptModel(checkpoint, path)
    try:
        kept.check_codes()
    except InputError:  # the file has types that the scheme `source` does not keep
        return
    for name, shape in scoped_tensors(checkpoint.config):
        codes = kept.codes(name)
        decoded_NK = dequantize(codes)
        if codes.shape != shape or not np.array_equal(decoded_NK, checkpoint.float32(name)):
            raise AssertionError(f"{name} is not what its codes decode to")


# --- changes ---------------------------------------------------------------------------------------------


def change_value(data: bytearray, seed: Seed, random: Random) -> None:
    """Write another number where a value begins, or near it."""
    at = random.choice(seed.places) + random.choice((-4, 0, 0, 0, 4, 8, 12))
    number = random.choice((*NUMBERS, random.getrandbits(64)))
    packed = random.choice((number.to_bytes(8, "little")[: random.choice((1, 4, 8))], _float(random)))
    data[at : at + len(packed)] = packed


def change_bytes(data: bytearray, seed: Seed, random: Random) -> None:
    """Write other bytes anywhere, mostly in the header."""
    end = seed.header if random.random() < 0.8 else len(data)
    for _ in range(random.choice((1, 4, 16))):
        at = random.randrange(max(1, min(end, len(data))))
        data[at : at + 1] = random.choice((b"\0", b"\xff", random.randbytes(1)))


def change_size(data: bytearray, seed: Seed, random: Random) -> None:
    """Cut the file, or remove, repeat or replace some bytes of the header."""
    at, size = random.randrange(seed.header), random.choice((1, 4, 8, 64))
    match random.randrange(4):
        case 0:
            del data[random.randrange(len(data) + 1) :]
        case 1:
            del data[at : at + size]
        case 2:
            data[at:at] = data[at : at + size]
        case _:
            data[at : at + size] = random.randbytes(size)


def _float(random: Random) -> bytes:
    return struct.pack("<f", random.choice(FLOATS))


# --- seeds -----------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    """Write small files of three families, with two kinds of tokenizers, plain and quantized."""
    found = []
    for family, tokenizer in (("llama", None), ("gemma2", sentencepiece_tokenizer()), ("gpt_neox", None)):
        own = folder / family
        own.mkdir(parents=True)
        changes = {"intermediate_size": 64}
        package = exported_package(own / "blobs", family, tokenizer=tokenizer, changes=changes)
        path = written(package, own / "float32")
        found += [path, coded(path, own / "coded.gguf", TYPES)]
    return found


def _seed(path: Path) -> Seed:
    data, file = path.read_bytes(), GgufFile(path)
    names = [len(key).to_bytes(8, "little") + key.encode() for key in (*file.metadata, *file.tensors)]
    # The 4 bytes behind a name are the type of a value or the number of a tensor's dimensions.
    places = [data.index(name) + len(name) + 4 for name in names]
    header = min(place.begin for place in file.tensors.values())
    return Seed(data=data, header=header, places=(8 + 4, 16 + 4, *places))


if __name__ == "__main__":
    sys.exit(main("fuzz_gguf", __doc__, GgufFuzzer))
