"""Measure a 2:4 model in 4 bits: its loss, and the gain of personal training on it.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.sparse.device

The model is pruned to 2:4 by SparseGPT and recovered by masked LoRA. The recovery has more steps and a larger
rank than in the comparison of ways. The mask is selected among the kept weights, as a job of the service
does. The gains come from the agent's default training, on the dense and the sparse model, with the same text.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.choices import MaskMethod
from permille.corpora.sequences import POOL, token_sequences
from permille.engines.factory import open_engine
from permille.models.checkpoint import Checkpoint
from permille.models.loading import FileTokenizer, load_model
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask, pack_model
from permille.package.reader import Package
from permille.quantization import default_group_size, quantize
from permille.quantization.perplexity import apply_quantized
from permille.quantization.types import Scheme
from permille.sensitivity.fisher import fisher_scores
from permille.sensitivity.masks import select_mask
from permille_agent.embed import TrainOptions, package_tokenizer
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.model_packages import DENSITIES, Sources, sources_from_environment
from permille_lab.people.study import Study
from permille_lab.people.user_texts import Collection, cohort, read_users
from permille_lab.quantization.__main__ import texts
from permille_lab.sparse.__main__ import CALIBRATION, CASES, LENGTH, Case, losses, material
from permille_sparsify.plan import Pattern, PruningMethod, PruningPlan, RecoveryPlan
from permille_sparsify.recovery import recover_model
from permille_sparsify.streaming import PruningText, prune_model

PATTERN = "2:4"
RANK, ROWS = 16, 8
RATES = (0.01, 0.003)
"""Learning rates of the recovery. People train on the model of the first one."""
STEPS: Mapping[str, int] = {"stories260K-hf": 400, "reference-7M": 240}
PEOPLE, PEOPLE_STEPS = 10, 40
_LEAST_CHARACTERS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Folders of a sparse model before and after its recovery."""

    pruned: Path
    recovered: Path


def made(sources: Sources, case: Case, folder: Path, rate: float) -> Made:
    """Prune and recover the model, unless this is done. After a kill, a call continues the work."""
    source = Checkpoint(sources.models / case.model)
    named = f"{case.model}-{rate}"
    found = Made(pruned=folder / f"{case.model}-pruned", recovered=folder / f"{named}-recovered")
    if (found.recovered / "model.safetensors").exists():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, steps = FileTokenizer(source.folder), STEPS[case.model]

    def rows(number: int, skip: int) -> NDArray[np.int64]:
        return token_sequences(tokenizer, texts(sources.data, case.text), number, LENGTH, 0, skip=skip)

    pattern = Pattern.parse(PATTERN)
    prune_model(
        source,
        found.pruned,
        PruningText(calibration_NT=rows(4 * CALIBRATION, 0)),
        PruningPlan(method=PruningMethod.SPARSEGPT, rates=pattern.rate, pattern=pattern),
        resume=folder / f"{case.model}-resume",
    )
    plan = RecoveryPlan(steps=steps, rows=ROWS, rate=rate, rank=RANK)
    text_NT = rows(steps * ROWS, POOL * CALIBRATION)
    incoming = folder / f"{named}-incoming"
    steps_file = folder / f"{named}-steps.npz"
    recover_model(Checkpoint(found.pruned), incoming, text_NT, plan, checkpoint=steps_file)
    incoming.rename(found.recovered)
    return found


def in_four_bits(folder: Path) -> Any:
    """Return the model with all linears rounded to NF4."""
    model, checkpoint = load_model(folder), Checkpoint(folder)
    coded = (
        (name, quantize(w_NK, Scheme.NF4, default_group_size(Scheme.NF4)))
        for name, w_NK in checkpoint.weights().items()
    )
    apply_quantized(model, coded)
    return model


def measured_losses(sources: Sources, case: Case, folder: Path, rate: float) -> Result:
    """Return the losses of the dense, pruned and recovered model, in float32 and in NF4.

    Losses are in nats per token of the texts that judge.
    """
    begun = time.process_time()
    judged = material(sources, case, 0).judged
    found = made(sources, case, folder, rate)
    models = {"dense": sources.models / case.model, "pruned": found.pruned, "recovered": found.recovered}
    return {
        "float32": {name: losses(load_model(path), judged) for name, path in models.items()},
        "nf4": {name: losses(in_four_bits(path), judged) for name, path in models.items()},
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def package_of(model: Path, case: Case, sources: Sources, folder: Path) -> Package:
    """Return a package of the model. Its mask is the most sensitive weights that are not 0."""
    checkpoint, density = Checkpoint(model), DENSITIES[case.model]
    rows_NT = token_sequences(FileTokenizer(model), texts(sources.data, "c4"), 64, LENGTH, 0)
    scores = fisher_scores(load_model(model), rows_NT)
    for name in scores:
        scores[name][checkpoint.float32(name) == 0] = 0
    chosen = ChosenMask(
        indices=select_mask(scores, MaskMethod.FISHER, density), method="fisher", density=density
    )
    blobs = BlobFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return Package.open(blobs, pack_model(blobs, checkpoint, chosen, Scheme.NF4))


def measured_people(sources: Sources, case: Case, folder: Path) -> Result:
    """Return each person's losses on held-out text, under the base and the trained state.

    The rows are [loss of the base, loss of the trained state], on the dense and on the sparse model.
    """
    begun = time.process_time()
    found = made(sources, case, folder, RATES[0])
    people = cohort(read_users(sources.data, Collection.LAMP7).users, least_characters=_LEAST_CHARACTERS)
    result: Result = {"people": [user.name for user in people[:PEOPLE]]}
    for name, model in (("dense", sources.models / case.model), ("sparse", found.recovered)):
        package = package_of(model, case, sources, folder / f"{case.model}-{name}-blobs")
        options = TrainOptions(seed=0, steps=PEOPLE_STEPS)
        study = Study(
            package=package,
            engine=open_engine(package, threads=1),
            tokenizer=package_tokenizer(package),
            options=options.within(int(package.config["max_position_embeddings"])),
            folder=folder / f"{case.model}-{name}-people",
        )
        rows = []
        for user in people[:PEOPLE]:
            person = study.person(user)
            own_K, _ = study.train(person, "own")
            base, tokens, _ = study.nats(person, package.values())
            own, _, _ = study.nats(person, own_K)
            rows.append([round(base / tokens, 6), round(own / tokens, 6)])
        result[name] = {"losses": rows, "k": package.k}
    return result | {"cpu_seconds": round(time.process_time() - begun, 1)}


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "sparse")
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sources, cells = sources_from_environment(), Cells(options.cells)
    for case in CASES:
        if case.model in options.models:
            settings = {"model": case.model, "pattern": PATTERN, "steps": STEPS[case.model], "rank": RANK}
            folder = options.folder / "sparse-device"
            for rate in RATES:
                measure = partial(measured_losses, sources, case, folder, rate)
                cells.once("device", settings | {"rate": rate}, measure)
            with_people = settings | {"people": PEOPLE, "own_steps": PEOPLE_STEPS}
            cells.once("device people", with_people, partial(measured_people, sources, case, folder))


if __name__ == "__main__":
    main()
