"""Measure the accuracy of sparse models on tasks without training for them.

    PERMILLE_MODELS=DIR PERMILLE_DATA=DIR python -m permille_lab.sparse.tasks

BoolQ is one of the seven tasks of the paper. RTE and COPA are not.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.loading import load_model
from permille_lab.evaluate.cell_data import Encoder
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.model_packages import sources_from_environment
from permille_lab.models.trainables import parameters_of
from permille_lab.sparse.__main__ import CASES, Bench, material, tuned
from permille_lab.sparse.rounds import iterate
from permille_lab.sparse.ways import ABLATED, Way, plan_of
from permille_lab.tasks.examples import Task
from permille_lab.tasks.rows import read_file
from permille_lab.tasks.scoring import Choices, encode_example, score
from permille_sparsify.plan import PruningPlan
from permille_sparsify.streaming import PruningText, prune_model

CASE: Final = CASES[1]
DENSE, PRUNED = "dense", "pruned by Wanda"
FILES: Final = {
    Task.BOOLQ: "tasks/BoolQ/val.jsonl",
    Task.RTE: "tasks/RTE/val.jsonl",
    Task.COPA: "tasks/COPA/test_with_gold.jsonl",
}
ITEMS, MAX_TOKENS = 200, 256


def made(bench: Bench, way: str) -> Any:
    """Return the model of a way at 60 % zeros, with seed 0."""
    source = Checkpoint(bench.sources.models / CASE.model)
    if way == DENSE:
        return load_model(source.folder)
    text = material(bench.sources, CASE, 0).work
    found = Way.WANDA if way == PRUNED else Way(way)
    plan = plan_of(found, ABLATED, 0, tuned(bench.cells, bench.sources, CASE, bench.work))
    shutil.rmtree(bench.work, ignore_errors=True)
    folder = bench.work / "alone"
    if way == PRUNED:
        alone = PruningPlan(method=plan.method, rates=plan.rate)
        prune_model(source, folder, PruningText(calibration_NT=text.calibration_NT), alone)
    else:
        folder, _ = iterate(source, bench.work, text, plan)
    return load_model(folder)


def answered(bench: Bench, way: str) -> Result:
    """Return a string for each task, with a 1 for each item whose right answer is the likeliest per token."""
    begun = time.process_time()
    model = made(bench, way)
    trainable = parameters_of(model, [])
    nothing, encoder = np.zeros(0, np.float32), Encoder(bench.sources.models / CASE.model)
    result: Result = {}
    for task, file in FILES.items():
        examples = read_file(task, bench.sources.data / file).examples
        items = list(islice(_fitting(examples, encoder), ITEMS))
        scored = score(lambda batch: trainable.token_losses(nothing, batch), items)
        result[task.value] = "".join(str(int(right)) for right in scored.correct_N)
    return {"right": result, "cpu_seconds": round(time.process_time() - begun, 1)}


def _fitting(examples: Sequence[Any], encoder: Encoder) -> Iterator[Choices]:
    for example in examples:
        try:
            yield encode_example(example, encoder, begin=encoder.begin, max_tokens=MAX_TOKENS)
        except InputError:  # a candidate is longer than MAX_TOKENS
            continue


def main() -> None:
    """Measure the missing cells."""
    options = settings_parser(__doc__, "sparse").parse_args()
    torch.set_num_threads(options.threads)
    work: Path = options.folder / "sparse-tasks"
    work.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(cells=Cells(options.cells), sources=sources_from_environment(), work=work)
    for way in (DENSE, PRUNED, Way.WANDA.value, Way.ITERATIVE.value):
        settings = {"model": CASE.model, "target": ABLATED, "way": way, "items": [ITEMS, MAX_TOKENS]}
        bench.cells.once("tasks", settings, partial(answered, bench, way))


if __name__ == "__main__":
    main()
