"""Build the package of a model in a work folder, by the steps of `permille.pipeline`.

A finished step leaves its result below `build`, and is skipped if the build starts again:

    corpus    the public text: `c4`, or `file`
    drawn     digest of the drawn sequences
    mask      digest of the mask's description
    weights   digest of the description of the quantized layers
    package   digest of the package
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from permille.choices import Embeddings, StreamedDataset
from permille.corpora.included import included_corpus, reaches_hub
from permille.corpora.sources import file_texts
from permille.digests import digest_of_file
from permille.exits import CommandError, Exit
from permille.files import write_atomic
from permille.models.checkpoint import Checkpoint
from permille.models.conversion import modern_folder
from permille.models.settings import within_positions
from permille.package.blobs import BlobFolder
from permille.package.build import ChosenMask
from permille.package.manifest import Quantization
from permille.package.reader import Package
from permille.pipeline.draw import Corpus, Drawn, Sampling
from permille.pipeline.inputs import Made, SourceModel, versions
from permille.pipeline.pack import pack, reference_sampling
from permille.pipeline.quantize import nearest_codes, quantize, source_codes
from permille.pipeline.select import MaskChoice, read_mask, write_choice
from permille.quantization import default_group_size
from permille.quantization.types import Scheme
from permille_personal.command import Part, Shown
from permille_personal.request import Request

SEQUENCES, LENGTH = 32, 256
"""Fewer and shorter sequences than a build uses by default, so that the mask takes minutes on a laptop."""


def built_package(request: Request, shown: Shown) -> Package:
    """Build the package of a request, or open it if it is built.

    Raises:
        CommandError: there is no public text.
        PermilleError: a step failed. The same call continues after the last finished step.
    """
    folder = request.work / "build"
    blobs = BlobFolder(folder / "blobs")
    blobs.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    done = folder / "package"
    if not done.exists():
        corpus = _corpus(request, folder, shown)
        _once(done, lambda: _build(request, folder, blobs, corpus, shown))
    # Only the build reads these files.
    for left in ("models", "scoring"):
        shutil.rmtree(folder / left, ignore_errors=True)
    return Package.open(blobs, done.read_text(encoding="ascii"))


def _build(request: Request, folder: Path, blobs: BlobFolder, corpus: Corpus, shown: Shown) -> str:
    from transformers.utils import logging

    from permille.models.loading import FileTokenizer
    from permille.pipeline.score import Scoring

    logging.disable_progress_bar()  # each load of the model would print one between our lines
    say, progress = shown.say, shown.progress
    progress(0.0, "opening the model")
    model = _model(request.model, folder / "models")
    checkpoint = model.checkpoint
    choice = MaskChoice(density=request.density)

    def draw() -> str:
        progress(0.01, "reading the public text")
        length = within_positions(checkpoint.config, LENGTH)
        sampling = Sampling(number=SEQUENCES, length=length, seed=choice.seed)
        return corpus.draw(FileTokenizer(checkpoint.folder), sampling).put(blobs)

    def mask() -> str:
        scoring = Scoring(checkpoint=checkpoint, drawn=drawn, progress=progress, work=folder / "scoring")
        base = scoring.base()
        say(f"   loss of the model on the public text: {base['loss']:.3f} nats per token")
        for remark in base["remarks"]:
            say(f"   Look at this: {remark}")
        return write_choice(blobs, model, choice, scoring.scored(scoring.scores(), base), progress).put(blobs)

    def weights() -> str:
        shown.begin(Part.WEIGHTS, "storing them in few bits")
        codes = source_codes(model, how) if how.name is Scheme.SOURCE else nearest_codes(model, how)
        return quantize(blobs, model, how, Embeddings.Q8_0, codes, progress=progress).put(blobs)

    drawn = Drawn.stored(blobs, _once(folder / "drawn", draw))
    (folder / "scoring").mkdir(exist_ok=True)
    chosen = Made.stored(blobs, _once(folder / "mask", mask))
    how = Quantization(name=Scheme(request.scheme), group_size=default_group_size(request.scheme))
    coded = Made.stored(blobs, _once(folder / "weights", weights))
    shown.begin(Part.PACKAGE, "writing and verifying it")
    text, _ = corpus.draw_held_out(FileTokenizer(checkpoint.folder), reference_sampling(checkpoint.config))
    return pack(
        blobs,
        checkpoint,
        ChosenMask(
            indices=read_mask(blobs, chosen.layers[0].digest),
            method=choice.method.value,
            density=choice.density,
            scope=choice.scope,
        ),
        coded.layers,
        how,
        text=text,
        provenance={"mask": chosen.provenance, "quantization": coded.provenance},
        made=versions("tokenizers"),
        work=folder / "scoring",
        progress=progress,
    ).digest


def _once(path: Path, make: Callable[[], str]) -> str:
    """Return the text of a file. If it is missing, write what `make` returns."""
    if not path.exists():
        write_atomic(path, make().encode("ascii"))
    return path.read_text(encoding="ascii")


def _model(source: Path, folder: Path) -> SourceModel:
    """Open the model. An older format is converted below `folder`."""
    if not source.is_file():
        checkpoint = Checkpoint(modern_folder(_linked(source, folder / "model"), folder))
        kind, name = "folder", "model"
    else:
        from permille.models.gguf.checkpoint import GgufCheckpoint  # needs the gguf extra

        checkpoint = GgufCheckpoint(source, folder)
        kind, name = "gguf", "model.gguf"
    return SourceModel(
        checkpoint=checkpoint,
        provenance={"kind": kind, "location": name, "digest": checkpoint.digest()},
        gguf=source if source.is_file() else None,
    )


def _linked(source: Path, place: Path) -> Path:
    """Link a folder into the work folder. Its links, as in a cache of the hub, become files."""
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, place, copy_function=_link)
    return place


def _link(source: str, place: str) -> None:
    try:
        os.link(os.path.realpath(source), place)
    except OSError:  # another file system
        shutil.copyfile(source, place)


def _corpus(request: Request, folder: Path, shown: Shown) -> Corpus:
    """Choose the public text, and tell the person. A build that goes on keeps its text."""
    known = (folder / "corpus").exists()
    streams = _once(folder / "corpus", lambda: "c4" if request.corpus is None and reaches_hub() else "file")
    if known:
        words = "the same text as before"
    elif streams == "c4":
        words = "C4, streamed from the hub (--corpus FILE takes another)"
    else:
        included = "the small text that is included, since the hub cannot be reached; C4 is better "
        words = str(request.corpus or f"{included}(--corpus FILE)")
    shown.begin(Part.MASK, f"the sensitive weights, found with {words}. This takes some minutes.")
    if streams == "c4":
        from permille.corpora.streams import streamed_texts

        c4 = StreamedDataset.C4
        return Corpus(
            texts=partial(streamed_texts, c4, "train"),
            provenance={"kind": "streamed", "location": c4.value, "split": "train"},
        )
    file = request.corpus or included_corpus()
    if file is None:
        raise CommandError("This installation has no public text. Name one with --corpus FILE.", Exit.USAGE)
    suffix = ".jsonl.gz" if file.name.endswith(".jsonl.gz") else file.suffix
    return Corpus(
        texts=partial(file_texts, file),
        provenance={"kind": "file", "location": f"corpus{suffix}", "digest": digest_of_file(file)},
    )
