"""The part of the package job that measures how far projected gradients are from the exact ones."""

from permille.corpora.sequences import token_sequences
from permille.errors import InputError
from permille.package.measurements import precision_measurements
from permille.package.reader import Package
from permille.package.writer import add_measurements
from permille_workers.context import TaskContext
from permille_workers.tasks.sources import SourceModel, open_corpus

_BEGINS, _ENDS = 0.3, 0.9  # of the job's progress
_SEED = 0


def add_precision(context: TaskContext, digest: str, model: SourceModel, corpus_id: str | None) -> str:
    """Measure the package on a few sequences of the corpus; the digest of the package that says so.

    Raises:
        InputError: no corpus, one without enough text, or derivatives that are all zero or not finite.
        RetryableError: a data set that cannot be reached.
    """
    from permille.engines.package_precision import LENGTH, SEQUENCES, measure_package
    from permille.models.loading import FileTokenizer

    if corpus_id is None:
        raise InputError("expected a corpus to measure the precision on, or a mask that was made with one")
    context.progress(_BEGINS, "reading the corpus")
    texts = open_corpus(context, corpus_id).texts(context)
    tokenizer = FileTokenizer(model.checkpoint.folder)
    sequences_BT = token_sequences(tokenizer, texts, SEQUENCES, LENGTH, _SEED)
    package = Package.open(context.blobs, digest)

    def progress(share: float, message: str) -> None:
        context.progress(_BEGINS + (_ENDS - _BEGINS) * share, message)

    rows = measure_package(package, sequences_BT, context.work_folder, progress)
    return add_measurements(package, precision_measurements(rows))
