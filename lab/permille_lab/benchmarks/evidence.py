"""The comparisons of the papers, repeated: sweeps, gradients, times; then the page with the verdicts.

    python -m permille_lab.benchmarks.evidence --models DIR/stories260K-hf DIR/reference-7M
    python -m permille_lab.benchmarks.evidence --stage table --model stories260K-hf --minutes 60
    python -m permille_lab.benchmarks.evidence --restore docs/results --page

Stop it whenever you like: what is finished is durable, and the same command goes on. The page is written at
the end of each call (`--page` alone writes it from what there is), and beside it every result that it was
made from: `--restore` takes them up in another clone, where its folder has none of a sweep or a part of them.
A page in --output that shows what is not here stays; the new one is then in FOLDER/page. Two calls may run at
once if neither restores and no model is common to both.

Files: PERMILLE_MODELS names a folder of models, PERMILLE_DATA one of tasks (`tasks/BoolQ/val.jsonl`, ...),
text and people (`users/lamp7_dev`); or `--materials FILE`, a TOML file with `models`, `corpus` and
`[tasks.<name>]` like a sweep's.

Hours of one core, reckoned from cells measured on a shared Zen 3 core with AVX2 (a run and its test on SST-2:
20 s with stories260K, 25 s with reference-7M for a mask, 45 s for an adapter, 100 s for all weights; a search
is 11 to 15 shorter runs, of `fractions` 4 to 7); `prior`, `steps` and `memory` are minutes. The last rows
are of a shared core with AVX-512; tasks of which references show nothing take no more than these (those of
COPA, RTE and WSC; with reference-7M not timed alone). `nf4-adapters` and `prefix` of a table, and `fractions`
of `text`, were not timed and come on top. `longer` was timed beside other work, without all weights, which
were not run:

    stage                   stories260K    reference-7M
    coverage, transfer              0.1             0.1
    table (first task)              1.3             2.2
    fractions (first task)          1.0             1.3
    flat (first task)               0.6             0.9
    queries (first task)            0.8             1.2
    schemes (first task)            0.3             0.4
    table (`text`)                  2.3             4.5
    longer (`text`)                 0.7             1.3
    references of another task      0.3
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from permille.errors import PermilleError
from permille_lab.benchmarks.evidence_materials import find_materials
from permille_lab.benchmarks.evidence_page import kept
from permille_lab.benchmarks.evidence_runner import Runner, TimeIsUpError

STAGES = (
    "prior",
    "coverage",
    "transfer",
    "table",
    "fractions",
    "flat",
    "longer",
    "queries",
    "schemes",
    "steps",
    "memory",
)
FOLDER, QUICK_FOLDER = Path("build/evidence"), Path("build/evidence-quick")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the page. Exit status: 0 done or out of minutes, 1 refused."""
    options = _parser().parse_args(arguments)
    try:
        folder = options.folder or (QUICK_FOLDER if options.quick else FOLDER)
        materials = find_materials(options.materials, options.models, folder)
        runner = Runner(
            materials,
            folder,
            quick=options.quick,
            minutes=options.minutes,
            shape=options.shape,
            layers=options.layers,
            threads=options.threads,
        )
        output = options.output or folder / "page"
        if options.restore:
            runner.restore(options.restore)
        kept(output)  # refused now rather than hours later
        try:
            _run(runner, options)
        except TimeIsUpError:
            print("the minutes are over; the same command goes on", file=sys.stderr)
        runner.page(output)
    except PermilleError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _run(runner: Runner, options: argparse.Namespace) -> None:
    if options.page:
        return
    wanted = options.stage or STAGES
    for model in runner.materials.models:
        if options.model not in (None, model.name):
            continue
        for stage in wanted:
            for task in runner.materials.tasks:
                if options.task in (None, task):
                    runner.run(stage, model, task)
    if "memory" in wanted:
        runner.memory()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help=f"results and sweeps; default: {FOLDER}, quick {QUICK_FOLDER}"
    )
    parser.add_argument("--output", type=Path, help="of the page; default: FOLDER/page")
    parser.add_argument("--restore", type=Path, help="of a page: first take up the results beside it")
    parser.add_argument("--materials", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", help="transformers folders")
    parser.add_argument("--model", help="only this one, by name")
    parser.add_argument("--task", help="only this one")
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--minutes", type=float, help="begin no new cell or trial after these")
    parser.add_argument("--quick", action="store_true", help="a few steps of all: numbers mean nothing")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--shape", default="1.1B", help="of the memory figure; see random_packages")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


if __name__ == "__main__":
    sys.exit(main())
