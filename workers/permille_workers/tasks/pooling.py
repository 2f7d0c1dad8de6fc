"""The pooling job: train the selected weights of a package on public text, and add the result to the package.

The result is called a pooled state. Devices can start their training from it. This job needs only
the package, not the original model. A state is published only if a statistical test shows that it is better
than the base model on held-out text of the corpus.
"""

from typing import cast

from permille.engines.factory import open_engine
from permille.engines.interface import GradientEngine
from permille.errors import InputError
from permille.models.settings import within_positions
from permille.package.manifest import decimal_text
from permille.pipeline.draw import Sampling
from permille.pipeline.inputs import part, versions
from permille.schemas.packages import PoolingCreate
from permille.tokenizer_files import SETTINGS_FILES
from permille.training.pooling import PoolingPlan, pool, write_pooled
from permille_workers.runtime.context import Publish, TaskContext
from permille_workers.tasks.artifacts import open_parent, publishes_package
from permille_workers.tasks.sources import open_corpus

_TRAINED = 0.95  # the job's progress when the training has ended


def run(context: TaskContext, request: PoolingCreate) -> Publish:
    """Train a state, test whether it is better, and publish a package with it.

    Raises:
        InputError: the text is too short, or the state is not significantly better than the base model.
        PackageError: the package is damaged.
        RetryableError: the data set cannot be reached.
    """
    from permille.models.loading import FileTokenizer

    row, manifest, package = open_parent(context, request.package_digest)
    context.progress(0.0, "reading the corpus")
    corpus = open_corpus(context, request.corpus_id)
    # `tokenizer_config.json` says whether a text begins with BOS.
    for name in package.manifest.files().keys() & {"tokenizer.json", *SETTINGS_FILES}:
        (context.work_folder / name).write_bytes(package.file(name))
    length = within_positions(package.config, request.length)
    sampling = Sampling(number=request.sequences, length=length, seed=request.seed)
    sequences = corpus.draw(FileTokenizer(context.work_folder), sampling)
    context.progress(0.02, "loading the package")
    settings = context.settings
    engine = cast("GradientEngine", open_engine(package, device=settings.device, threads=settings.threads))

    found = pool(
        engine,
        package,
        sequences.tokens_NT,
        PoolingPlan(steps=request.steps, batch_rows=request.rows, seed=request.seed),
        checkpoint=context.work_folder / "moments",
        progress=part(context.progress, 0.03, _TRAINED, "step"),
    )
    losses = f"{found.loss_base:.4f} -> {found.loss_pooled:.4f} nats per token"
    if not found.better:
        raise InputError(
            f"The state is not surely better than the base on held-out text (loss {losses}). Train longer, "
            "or on text that is more similar to the text on devices."
        )
    context.progress(_TRAINED, f"publishing: held-out loss {losses}")
    made = write_pooled(
        context.blobs,
        manifest,
        found,
        {
            "parent": package.digest,
            "corpus": corpus.provenance,
            "steps": request.steps,
            "rows": request.rows,
            "sequences": request.sequences,
            "length": length,
            "seed": request.seed,
            "loss_base": decimal_text(round(found.loss_base, 4)),
            "loss_pooled": decimal_text(round(found.loss_pooled, 4)),
            "versions": versions("tokenizers"),
        },
    )
    return publishes_package(context, row.model_id, made)
