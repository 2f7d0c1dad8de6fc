"""The file that says what a sweep compares: TOML, every key checked, nothing guessed.

    models = ["models/reference-7M"]
    corpus = "c4_sample.jsonl"          # JSON lines with `text`, for sensitive-c4
    bases = ["bf16", "nf4"]
    methods = ["zero-shot", "zo:sensitive-c4", "zo:random", "fo:lora-8"]
    seeds = [0, 1, 2]

    [tasks.sst2]
    train = "SST-2/train.tsv"
    test = "SST-2/dev.tsv"              # optional: else the train file is divided

Paths are relative to the file's folder.
"""

import importlib.util
import json
import tomllib
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from permille.errors import InputError
from permille.zo.header import EstimatorKind
from permille_lab.evaluate.methods import Method, method
from permille_lab.evaluate.positions import check_positions
from permille_lab.evaluate.prompts import Task, Wording
from permille_lab.evaluate.splits import PAPER_SIZES
from permille_lab.evaluate.tuning import TUNING_SEED_OFFSET


class Base(StrEnum):
    """What the frozen weights are stored as; products are float32 in all of them."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    NF4 = "nf4"
    INT4_G32 = "int4-g32"
    INT4_G128 = "int4-g128"
    SQUEEZELLM = "squeezellm"
    AUTO_ROUND = "auto-round"
    AUTO_ROUND_INT4 = "auto-round-int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """Files of one task; `test` None: the train file is divided into all three parts."""

    train: Path
    test: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is compared, and how much of it.

    Attributes:
        trials: step factors that every trained method tries first (odd).
        tuning_seeds: seeds that choose among the best step factor of the first one and its neighbours, going
            on while a neighbour is better (odd).
        sizes: examples of train, validation and test.
        max_tokens: longest example; the prompt's front is cut.
        estimator: `forward` takes exact directional derivatives, all queries from one gradient: on models of
            this size several times cheaper than the two forward passes a query of `spsa`.
        refresh_steps: how often dynamic masks are selected again.
    """

    models: tuple[Path, ...]
    corpus: Path
    tasks: dict[Task, TaskFiles]
    methods: tuple[Method, ...]
    bases: tuple[Base, ...] = (Base.BF16,)
    seeds: tuple[int, ...] = (0, 1, 2)
    density: float = 0.001
    zo_steps: int = 1000
    fo_steps: int = 100
    queries: int = 4
    estimator: EstimatorKind = EstimatorKind.SPSA
    batch_size: int = 16
    trials: int = 3
    tuning_seeds: int = 1
    evaluations: int = 10
    sizes: tuple[int, int, int] = PAPER_SIZES
    max_tokens: int = 256
    refresh_steps: int = 100
    corpus_sequences: int = 64
    corpus_tokens: int = 128
    wording: Wording = Wording.SENSITIVE


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file.

    Raises:
        InputError: not TOML, an unknown or missing key, or a value that is not what the key takes.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(f"expected a sweep as TOML in {path}, got {exc}") from exc
    return sweep_of(found, path.parent)


def sweep_of(found: dict[str, Any], folder: Path) -> Sweep:
    """Check the keys of a sweep.

    Args:
        found: what the file says, or a job's payload.
        folder: what relative paths begin at.

    Raises:
        InputError: an unknown or missing key, or a value that is not what the key takes.
    """
    known = {field.name for field in fields(Sweep)}
    if unknown := sorted(found.keys() - known):
        raise InputError(f"expected keys of {', '.join(sorted(known))}; got {', '.join(unknown)}")
    if missing := sorted({"models", "corpus", "tasks", "methods"} - found.keys()):
        raise InputError(f"expected {', '.join(missing)} in a sweep, got none")
    typed: dict[str, Any] = {
        "models": tuple(_path(folder, "models", name) for name in _list(found, "models", str)),
        "corpus": _path(folder, "corpus", found["corpus"]),
        "tasks": {_task(name): _files(folder, name, value) for name, value in _table(found["tasks"])},
        "methods": tuple(method(name) for name in _list(found, "methods", str)),
    }
    if "bases" in found:
        typed["bases"] = tuple(_member(Base, "bases", name) for name in _list(found, "bases", str))
    if "wording" in found:
        typed["wording"] = _member(Wording, "wording", str(found["wording"]))
    if "estimator" in found:
        typed["estimator"] = _member(EstimatorKind, "estimator", str(found["estimator"]))
    if "seeds" in found:
        typed["seeds"] = tuple(_list(found, "seeds", int))
    if "sizes" in found:
        typed["sizes"] = _sizes(_list(found, "sizes", int))
    for name in found.keys() - typed.keys():
        typed[name] = _number(name, found[name])
    return _checked(Sweep(**typed))


def _checked(sweep: Sweep) -> Sweep:
    for name in ("trials", "tuning_seeds"):
        if getattr(sweep, name) % 2 == 0:
            raise InputError(f"expected an odd number of {name}, got {getattr(sweep, name)}")
    if sweep.estimator is EstimatorKind.SPLIT:
        raise InputError("expected an estimator without blocks, got split")
    if len({model.name for model in sweep.models}) < len(sweep.models):
        raise InputError("expected models in folders of different names, got a name twice")
    if not sweep.seeds or min(sweep.seeds) < 0 or max(sweep.seeds) >= TUNING_SEED_OFFSET:
        raise InputError(f"expected seeds from 0 to {TUNING_SEED_OFFSET - 1}, got {list(sweep.seeds)}")
    for name in ("models", "tasks", "methods", "bases", "seeds"):
        found = list(getattr(sweep, name))
        if not found or len(set(found)) < len(found):
            raise InputError(f"expected one or more of {name}, each once, got {len(found)}")
    for model in sweep.models:
        if missing := [name for name in ("config.json", "tokenizer.json") if not (model / name).is_file()]:
            raise InputError(f"expected {' and '.join(missing)} in {model}, got none")
        check_positions(
            model.name,
            _config(model),
            sweep.methods,
            max_tokens=sweep.max_tokens,
            corpus_tokens=sweep.corpus_tokens,
        )
    if any(item.size for item in sweep.methods) and importlib.util.find_spec("peft") is None:
        raise InputError(
            'expected peft for adapters, which is not installed: pip install "permille[evaluate]"'
        )
    rounded = {Base.AUTO_ROUND, Base.AUTO_ROUND_INT4} & set(sweep.bases)
    if rounded and importlib.util.find_spec("auto_round") is None:
        raise InputError('expected auto-round, which is not installed: pip install "permille[evaluate]"')
    return sweep


def _config(model: Path) -> dict[str, Any]:
    try:
        found = json.loads((model / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError(f"expected JSON in {model / 'config.json'}, got {exc!r:.200}") from exc
    if not isinstance(found, dict):
        raise InputError(f"expected a JSON object in {model / 'config.json'}, got {type(found).__name__}")
    return found


def _sizes(found: list[int]) -> tuple[int, int, int]:
    if len(found) != 3 or min(found) < 1:
        raise InputError(f"expected sizes of train, validation and test, got {found}")
    return found[0], found[1], found[2]


def _number(name: str, value: Any) -> int | float:
    if name == "density":
        if type(value) not in (int, float) or not 0 < value <= 1:
            raise InputError(f"expected density as a number above 0 and at most 1, got {value!r}")
        return float(value)
    if type(value) is not int or value < 1:
        raise InputError(f"expected {name} as an integer of at least 1, got {value!r}")
    return value


def _list(found: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = found[key]
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise InputError(f"expected {key} as a list of {kind.__name__}, got {values!r:.80}")
    return values


def _table(value: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise InputError(f"expected tasks as tables, got {value!r:.80}")
    return list(value.items())


def _files(folder: Path, name: str, value: object) -> TaskFiles:
    if not isinstance(value, dict) or "train" not in value or value.keys() - {"train", "test"}:
        raise InputError(f"expected train and perhaps test of task {name}, got {value!r:.80}")
    test = value.get("test")
    return TaskFiles(
        train=_path(folder, f"tasks.{name}.train", value["train"]),
        test=None if test is None else _path(folder, f"tasks.{name}.test", test),
    )


def _task(name: str) -> Task:
    return Task(_member(Task, "tasks", name))


def _member(kind: type[StrEnum], key: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError as exc:
        raise InputError(f"expected {key} of {', '.join(kind)}; got {value!r:.60}") from exc


def _path(folder: Path, key: str, value: object) -> Path:
    if not isinstance(value, str):
        raise InputError(f"expected {key} as a path, got {value!r:.80}")
    path = folder / value
    if not path.exists():
        raise InputError(f"expected {key} to exist, got {path}")
    return path
