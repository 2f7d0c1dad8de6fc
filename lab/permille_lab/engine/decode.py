"""Measure tokens per second with the overlay, without it, and with llama.cpp.

The contenders take turns:

- `overlay`: an NF4 package with a density of 0.001
- `bare`: the same shape with one masked weight in each matrix, the least that a package can have
- `int4`: the same shape and density with int4 codes
- `llama.cpp`: the int4 package as Q4_0

Decoding is greedy, with a key-value cache in float32. The prompt is not timed. With one thread, times are
processor seconds, since other load on the machine disturbs these less. With more threads, they are wall-clock
seconds. For a token of `overlay`, the time of each kernel and of the interpreter is also measured.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from permille.engines.factory import LIGHT, open_engine
from permille.engines.interface import Engine
from permille.engines.sampling import TokenSampling
from permille.native.library import Argument, Library
from permille.package.reader import Package
from permille.quantization.types import Scheme
from permille_lab.engine.sizes import Sizes
from permille_lab.measuring.cells import Result
from permille_lab.measuring.machine import machine

_BARE_DENSITY = 1e-9
_PROMPT, _TOKENS = 16, 16

Clock = Callable[[], float]


def measure(folder: Path, sizes: Sizes) -> Result:
    """Measure all contenders in interleaved rounds."""
    before = machine()
    packages = {
        "overlay": sizes.package(folder),
        "bare": sizes.package(folder, density=_BARE_DENSITY),
        "int4": sizes.package(folder, Scheme.INT4),
    }
    clock = time.process_time if sizes.threads == 1 else time.perf_counter
    contenders = {
        which: partial(token_seconds, open_engine(package, LIGHT, threads=sizes.threads), package, clock)
        for which, package in packages.items()
    }
    # The server of llama.cpp needs a vocabulary, and packages of random weights have none.
    if "tokenizer.json" in packages["int4"].manifest.files():
        file = _as_gguf(folder, packages["int4"])
        contenders["llama.cpp"] = partial(llama_cpp_seconds, file, packages["int4"], sizes.threads, clock)
    seconds: dict[str, list[float]] = {which: [] for which in contenders}
    for _ in range(sizes.rounds):
        for which, contender in contenders.items():
            seconds[which] += contender()
    rates = {which: round(1 / statistics.median(found), 3) for which, found in seconds.items()}
    return {
        "tokens_per_s": rates,
        "token_ms": _profile(contenders["overlay"], clock),
        "ratio": round(rates["overlay"] / rates["bare"], 4),
        "machine": {"before": before, "after": machine()},
    }


def _profile(tokens: Callable[[], Iterator[float]], clock: Clock) -> dict[str, float]:
    """Return the milliseconds of a token by kernel, with its call from Python, and in the interpreter."""
    spent: dict[str, float] = defaultdict(float)
    call = Library.call

    def timed(library: Library, name: str, *arguments: Argument) -> int:
        begin = clock()
        result = call(library, name, *arguments)
        spent[name] += clock() - begin
        return result

    with mock.patch.object(Library, "call", timed):
        stream = tokens()
        next(stream)
        spent.clear()
        seconds = list(stream)
    found = dict(sorted(spent.items(), key=lambda part: -part[1])) | {
        "interpreter": sum(seconds) - sum(spent.values())
    }
    return {name: round(1e3 * total / len(seconds), 2) for name, total in found.items()}


def token_seconds(engine: Engine, package: Package, clock: Clock) -> Iterator[float]:
    """Yield the seconds of each token of a greedy text, except the first."""
    stream = engine.generate(package.values(), _prompt(package), TokenSampling(max_new_tokens=_TOKENS + 1))
    yield from _after_the_first(stream, clock)


def llama_cpp_seconds(
    file: Path, package: Package, threads: int, clock: Clock = time.perf_counter
) -> Iterator[float]:
    """Yield the mean seconds of a token that llama.cpp generates from a GGUF file, once for each token."""
    from permille_lab.exports.llama_cpp import LlamaCpp

    prompt = _prompt(package)
    with LlamaCpp(file, context=_PROMPT + 2 * _TOKENS, threads=threads) as peer:
        peer.greedy(prompt, 1)
        # Its cache now has the prompt. A token at a time would also measure requests.
        begin = clock()
        peer.greedy(prompt, _TOKENS)
        seconds = (clock() - begin) / _TOKENS
    yield from [seconds] * _TOKENS


def _as_gguf(folder: Path, package: Package) -> Path:
    from permille.engines.gguf.export import GGUF_FILE, export_gguf

    path = folder / "gguf" / package.digest.removeprefix("sha256:")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        export_gguf(package, None, path, kind="q4_0")
    return path / GGUF_FILE


def _prompt(package: Package) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(0, package.config["vocab_size"], _PROMPT)


def _after_the_first(stream: Iterator[int], clock: Clock) -> Iterator[float]:
    """Yield the seconds of each token, except the first. The time of the first contains the prompt."""
    next(stream)
    begin = clock()
    for _ in stream:
        now = clock()
        yield now - begin
        begin = now
