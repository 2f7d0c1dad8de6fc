"""The mask job: score the weights of a model, select the mask, and write a report about it."""

from permille.models.settings import within_positions
from permille.pipeline.draw import Drawn, Sampling
from permille.pipeline.inputs import SourceModel
from permille.pipeline.select import MaskChoice, Scored, write_choice
from permille.schemas.masks import FisherMaskCreate, WeightMaskCreate
from permille.sensitivity.scores import SHARD_SEQUENCES, fisher_work
from permille_workers.runtime.context import PartsToAdd, Publish, TaskContext
from permille_workers.tasks import shard
from permille_workers.tasks.artifacts import publishes_made
from permille_workers.tasks.sources import check_text_of_build, open_corpus, open_model, reach_corpus


def run(context: TaskContext, request: FisherMaskCreate | WeightMaskCreate) -> Publish | PartsToAdd:
    """Select a mask. If the scoring takes long, split it into parts, which are jobs of their own.

    Raises:
        InputError: the options contradict each other, or the model or corpus is unusable.
        RetryableError: the hub or the data set cannot be reached.
    """
    # Sequences that an earlier attempt drew need no corpus.
    needs_text = not isinstance(request, FisherMaskCreate) or shard.drawn_before(context) is None
    # Opening a model may take minutes.
    if isinstance(request, FisherMaskCreate) and needs_text:
        context.progress(0.0, "reaching the corpus")
        reach_corpus(context, request.corpus_id)
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    if needs_text:
        check_text_of_build(context, model)
    scored = _scored(context, model, request) if isinstance(request, FisherMaskCreate) else None
    if isinstance(scored, PartsToAdd):
        return scored
    choice = MaskChoice(
        method=request.method, density=request.density, scope=request.scope, seed=request.seed
    )
    made = write_choice(context.blobs, model, choice, scored, context.progress)
    return publishes_made(context, request.model_id, made)


def _scored(context: TaskContext, model: SourceModel, request: FisherMaskCreate) -> Scored | PartsToAdd:
    from permille.pipeline.score import Scoring

    drawn = shard.drawn_before(context) or _draw(context, model, request)
    scoring = Scoring(
        checkpoint=model.checkpoint,
        drawn=drawn,
        scope=request.scope,
        compute=context.compute,
        progress=context.progress,
        work=context.work_folder,
    )
    base = scoring.base()
    words = f"base: loss {base['loss']:.3f} nats per token on the corpus."
    context.progress(0.02, " ".join([words, *base["remarks"]]))
    work = fisher_work(drawn.tokens_NT.size, model.checkpoint.parameters)
    if request.sequences <= SHARD_SEQUENCES or work <= context.settings.fisher_split_flops:
        return scoring.scored(scoring.scores(), base)
    scoring.close()
    found = shard.split_or_join(context, request, drawn)
    return found if isinstance(found, PartsToAdd) else scoring.scored(found, base)


def _draw(context: TaskContext, model: SourceModel, request: FisherMaskCreate) -> Drawn:
    from permille.models.loading import FileTokenizer

    corpus = open_corpus(context, request.corpus_id)
    context.progress(0.01, "reading the corpus")
    length = within_positions(model.checkpoint.config, request.length)
    sampling = Sampling(number=request.sequences, length=length, seed=request.seed)
    return corpus.draw(FileTokenizer(model.checkpoint.folder), sampling)
