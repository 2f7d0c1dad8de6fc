"""What an evaluation will need, from its options, the models' configs and how long a task's rows are.

Estimates of what an evaluation does, of memory upper ones: every run loads a model, stores its weights
as the base says, takes its steps, looks at validation, and tests. Tuning runs come once for all seeds. Not
counted: a search that goes on beyond its first grid, and runs that begin anew because their loss rose above
the base, at most twice each.
"""

from dataclasses import dataclass

from permille.schemas.evaluations import EvaluationOptions
from permille.zo.log import EstimatorKind
from permille_lab.evaluate.methods import (
    DYNAMIC,
    IN_SEGMENTS,
    TASK_MASKS,
    Method,
    Order,
    TrainedSet,
    method,
)
from permille_lab.evaluate.specification import Base
from permille_service.preflights.estimates import (
    FISHER_FLOPS,
    FLOAT_BYTES,
    FORWARD_FLOPS,
    PROCESS_BYTES,
    SECONDS_A_WEIGHT,
    Needs,
    Sizes,
)

MAX_CELLS = 4096
CANDIDATES = 3  # answers that a test item is scored with, at most
MASK_EXAMPLES = 64
VALIDATION_BATCH = 32
ITEM_BYTES = 96  # name, outcome and loss of a test item in the results
HELD_ITEM_BYTES = 216  # the same where the worker holds it, at its peak
ROW_COPIES = 6  # a row as text, prompt, answers, group
# Copies of a model's weights, in float32, measured: as it is stored and as its mask is chosen; where the
# task's gradients choose it; where all weights are trained, besides one for each perturbed variant; for each
# masked weight of a set that is chosen again (who was ever in it is remembered one by one). One of those of
# all weights is the best of earlier attempts, which a run that begins anew holds besides.
COPIES, COPIES_OF_TASK_MASK, COPIES_OF_ALL, COPIES_OF_DYNAMIC = 4, 11, 22, 40
# Activations of a layer, in hidden vectors a token, that a gradient keeps.
LAYER_VECTORS = 20
CALIBRATED = {Base.SQUEEZELLM, Base.AUTO_ROUND, Base.AUTO_ROUND_INT4}  # bases that need the corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Of a task's files: their bytes, and tokens of a usual and of a long row."""

    size_bytes: int
    tokens: int
    longest: int


def cells_of(options: EvaluationOptions, models: int) -> int:
    """How many cells there are."""
    parts = (options.bases, options.tasks, options.methods, options.seeds)
    count = models
    for part in parts:
        count *= len(part)
    return count


def evaluation_needs(
    sizes: list[Sizes], options: EvaluationOptions, tasks: list[TaskFacts], *, cells: int, flops_per_s: float
) -> Needs:
    """What the whole sweep needs: the largest model's memory, the time of all runs.

    Args:
        sizes: of the models that are known.
        cells: of all models.
    """
    rows = ROW_COPIES * sum(task.size_bytes for task in tasks)
    memory = max((_memory(size, options, tasks) for size in sizes), default=0)
    rows += cells * options.sizes[2] * HELD_ITEM_BYTES
    return Needs(
        memory_bytes=memory + rows if memory else 0,
        disk_bytes=2 * cells * (options.sizes[2] * ITEM_BYTES + 4096),
        seconds=sum(_seconds(size, options, tasks, flops_per_s) for size in sizes),
    )


def _memory(sizes: Sizes, options: EvaluationOptions, tasks: list[TaskFacts]) -> int:
    copies = max(_copies(method(name), options) for name in options.methods) * sizes.parameters
    longest = min(options.max_tokens, max(task.longest for task in tasks))
    tokens = max(options.batch_size, VALIDATION_BATCH) * longest
    activations = tokens * (sizes.layers * LAYER_VECTORS * sizes.hidden + 3 * sizes.vocabulary)
    return PROCESS_BYTES + int(copies + activations) * FLOAT_BYTES


def _copies(one: Method, options: EvaluationOptions) -> float:
    """Copies of the weights that training one method holds at its peak."""
    if one.trained is TrainedSet.FULL:
        forward = options.estimator is EstimatorKind.FORWARD
        variants = options.queries if forward else 2 * options.queries
        return COPIES_OF_ALL + (variants if one.order is Order.ZEROTH else 0)
    copies = float(COPIES)
    if one.trained in TASK_MASKS:
        copies = COPIES_OF_TASK_MASK
    return copies + (COPIES_OF_DYNAMIC * options.density if one.trained in IN_SEGMENTS else 0)


def _seconds(sizes: Sizes, options: EvaluationOptions, tasks: list[TaskFacts], flops_per_s: float) -> float:
    methods = [method(name) for name in options.methods]
    tokens = 0.0  # of forward passes
    runs = 0
    for task in tasks:
        row = min(options.max_tokens, task.tokens)
        for one in methods:
            # Further tuning seeds try the best step size and its two neighbours, if none of these is better.
            tuning = options.trials + (3 * (options.tuning_seeds - 1) if options.trials > 1 else 0)
            number = len(options.seeds) + (tuning if one.order else 0)
            runs += number
            tokens += number * _forward_tokens(one, options, row)
    tokens *= len(options.bases)
    corpus = 0.0
    if any(one.trained is TrainedSet.SENSITIVE_C4 for one in methods) or CALIBRATED & set(options.bases):
        corpus = options.corpus_sequences * options.corpus_tokens * FISHER_FLOPS / FORWARD_FLOPS
    work = (tokens + corpus) * FORWARD_FLOPS * sizes.parameters
    return work / flops_per_s + runs * len(options.bases) * 3 * sizes.parameters * SECONDS_A_WEIGHT


def _forward_tokens(one: Method, options: EvaluationOptions, row: int) -> float:
    """Tokens of forward passes, and of what costs as much, that one run takes."""
    train, validation, test = options.sizes
    tested = test * CANDIDATES * min(options.max_tokens, row * (one.shots + 1))
    if one.order is None:
        return float(tested)
    gradient = FISHER_FLOPS / FORWARD_FLOPS
    if one.order is Order.FIRST:
        steps, passes = options.fo_steps, gradient
    else:
        steps = options.zo_steps
        passes = gradient if options.estimator is EstimatorKind.FORWARD else 2 * options.queries
    trained = steps * min(options.batch_size, train) * row * passes
    masks = 0.0
    if one.trained in TASK_MASKS:
        times = -(-steps // options.refresh_steps) if one.trained in DYNAMIC else 1
        masks = times * MASK_EXAMPLES * row * gradient
    evaluated = min(options.evaluations, steps) * validation * row
    return trained + masks + evaluated + tested
