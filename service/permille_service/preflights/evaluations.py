"""Whether an evaluation can be: models and corpus of the tenant, task files below the corpus root, a machine
that holds it. Of a task file the first rows are looked at, never more."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from permille.errors import InputError
from permille.models.sources import resolve_inside
from permille.schemas.evaluations import EvaluationCreate, TaskSource
from permille.schemas.problems import ProblemType
from permille.store import corpora, models
from permille_lab.evaluate.methods import method
from permille_lab.evaluate.positions import check_positions
from permille_lab.evaluate.prompts import Task
from permille_service.context import Service
from permille_service.preflights.estimates import Needs, sizes_of
from permille_service.preflights.evaluation_costs import MAX_CELLS, TaskFacts, cells_of, evaluation_needs
from permille_service.preflights.machine import Machine, look
from permille_service.preflights.verdict import require
from permille_service.problems import ApiError

SAMPLE_BYTES = 1 << 16
SUFFIXES = {Task.SST2: (".jsonl", ".tsv"), Task.SQUAD: (".json",)}
BYTES_A_TOKEN = 2  # of English most tokenizers take three to five


def check_evaluation(service: Service, tenant_id: str, body: EvaluationCreate) -> None:
    """Refuse an evaluation that the machine cannot hold. Raises as `needs_of_evaluation`, and ApiError
    (`preflight-refused`)."""
    machine = look(service.settings)
    require(needs_of_evaluation(service, tenant_id, body, machine), machine)


def needs_of_evaluation(service: Service, tenant_id: str, body: EvaluationCreate, machine: Machine) -> Needs:
    """What the request needs; models that no worker has read yet have no figures.

    Raises:
        NotFoundError: no such model or corpus.
        ApiError: `not-found` for a task file that is not there; `conflict` for one that leads out of the
            corpus root or is of another kind, for a streamed corpus, for too many cells and for rows that are
            longer than a model's positions.
    """
    cells = cells_of(body, len(body.model_ids))
    if cells > MAX_CELLS:
        raise ApiError(ProblemType.CONFLICT, f"expected at most {MAX_CELLS} cells, got {cells}")
    with service.database.read() as session:
        configs = [
            models.get(session, tenant_id=tenant_id, model_id=model_id).config for model_id in body.model_ids
        ]
        corpus = corpora.get(session, tenant_id=tenant_id, corpus_id=body.corpus_id)
    if corpus.kind != "file":
        raise ApiError(
            ProblemType.CONFLICT, f"expected a corpus that is a file, got {corpus.id}, which is {corpus.kind}"
        )
    _check_positions(body, configs)
    root = service.settings.corpus_root
    tasks = [task_facts(root, Task(name), files) for name, files in body.tasks.items()]
    known = [sizes_of(config) for config in configs if config is not None]
    return evaluation_needs(known, body, tasks, cells=cells, flops_per_s=machine.flops_per_s)


def _check_positions(body: EvaluationCreate, configs: Sequence[Mapping[str, object] | None]) -> None:
    """Of the models that a worker has read; it looks at the others itself."""
    methods = [method(name) for name in body.methods]
    for model_id, config in zip(body.model_ids, configs, strict=True):
        if config is None:
            continue
        try:
            check_positions(
                model_id, config, methods, max_tokens=body.max_tokens, corpus_tokens=body.corpus_tokens
            )
        except InputError as exc:
            raise ApiError(ProblemType.CONFLICT, str(exc)) from exc


def task_facts(root: Path, task: Task, source: TaskSource) -> TaskFacts:
    """Look at a task's files. Raises ApiError as `needs_of_evaluation`."""
    paths = [_inside(root, task, path) for path in (source.train, source.test) if path is not None]
    try:
        usual, longest = zip(*map(_row_bytes, paths), strict=True)
        size_bytes = sum(path.stat().st_size for path in paths)
    except OSError as exc:
        raise ApiError(
            ProblemType.CONFLICT, f"expected files of {task} that can be read: {exc.strerror}"
        ) from exc
    return TaskFacts(
        size_bytes=size_bytes,
        tokens=-(-max(usual) // BYTES_A_TOKEN),
        longest=-(-max(longest) // BYTES_A_TOKEN),
    )


def _inside(root: Path, task: Task, relative: str) -> Path:
    suffixes = SUFFIXES.get(task, (".jsonl",))
    if not relative.endswith(suffixes):
        raise ApiError(
            ProblemType.CONFLICT,
            f"expected a file of {task} named {' or '.join(suffixes)}, got {relative!r}",
        )
    if not (root / relative).exists():
        raise ApiError(ProblemType.NOT_FOUND, f"expected a file below the corpus root, got {relative!r}")
    try:
        return resolve_inside(root, relative, what="file")
    except InputError as exc:
        raise ApiError(ProblemType.CONFLICT, str(exc)) from exc


def _row_bytes(path: Path) -> tuple[int, int]:
    """Bytes of a usual and of the longest of the first rows."""
    with path.open("rb") as file:
        lengths = [len(row) for row in file.read(SAMPLE_BYTES).splitlines() if row.strip()]
    return (sum(lengths) // len(lengths) + 1, max(lengths)) if lengths else (1, 1)
