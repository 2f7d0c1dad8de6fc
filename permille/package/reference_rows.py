"""The reference of a package: rows of public text, and of answers by the base model (FORMAT 4.12).

A *target* is a token that the model has to predict. Some rows *pull*: they keep a training close to the
base model. For each of their targets, the reference names the base model's most probable tokens. The other
rows measure how much a trained state raises the loss on general text. This module writes and checks the
rows. `permille.training.reference` uses them.

Shapes: N rows, T tokens of a row, R targets of the rows that pull, S tokens named at a target.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.errors import PackageError
from permille.package.blobs import BlobFolder
from permille.package.limits import Role
from permille.package.manifest import Layer
from permille.package.safetensors_io import SafetensorsFile, SafetensorsWriter

NAMED_TOKENS = 16
MOST_ROWS = 1024
MOST_TOKENS = 1024
# The most tokens of all rows together. A training evaluates the measuring rows for the base model, and for up
# to 8 strengths of the trained change.
MOST_TOGETHER = 1 << 14
DTYPES = frozenset({"U32", "U8", "F16"})
_NAMES = ("ids", "spans", "kinds", "named_ids", "named_probabilities")
# Half precision changes a probability by a relative 2^-11 at most, so the sum at a target may exceed 1.
_LARGEST_SUM = 1.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceRows:
    """Rows, each with one span of targets.

    Attributes:
        ids_NT: int64 token ids; 0 after the end of a row.
        begin_N: int64, the position of the first target of a row, at least 1.
        end_N: int64, the position after the last token of a row. The last token is the last target.
        chat_N: bool, whether the row is a chat turn. Its targets are then the answer of the base model.
        pulls_N: bool, whether the row pulls. Otherwise it measures.
        named_RS: int64, the distinct ids of the base model's most probable tokens, for each target of the
            rows that pull.
        probability_RS: float32, the base model's probabilities of these tokens.
    """

    ids_NT: NDArray[np.int64]
    begin_N: NDArray[np.int64]
    end_N: NDArray[np.int64]
    chat_N: NDArray[np.bool_]
    pulls_N: NDArray[np.bool_]
    named_RS: NDArray[np.int64]
    probability_RS: NDArray[np.float32]

    def targets(self) -> NDArray[np.int64]:
        """Count the targets of each row, [N]."""
        return self.end_N - self.begin_N


def write_reference(blobs: BlobFolder, rows: ReferenceRows) -> Layer:
    """Store the rows as a layer.

    Raises:
        OSError: from the file system. No blob is left.
    """
    spans_N2 = np.stack([rows.begin_N, rows.end_N], axis=1)
    kinds_N2 = np.stack([rows.chat_N, rows.pulls_N], axis=1)
    with SafetensorsWriter(blobs) as writer:
        writer.add("ids", "U32", rows.ids_NT.shape, rows.ids_NT.astype("<u4"))
        writer.add("spans", "U32", spans_N2.shape, spans_N2.astype("<u4"))
        writer.add("named_ids", "U32", rows.named_RS.shape, rows.named_RS.astype("<u4"))
        writer.add("named_probabilities", "F16", rows.probability_RS.shape, rows.probability_RS.astype("<f2"))
        # The order of these calls does not matter: the writer sorts by the size of the dtype (FORMAT 4.1).
        writer.add("kinds", "U8", kinds_N2.shape, kinds_N2.astype(np.uint8))
        digest, size = writer.finish()
    return Layer(role=Role.REFERENCE, digest=digest, size_bytes=size)


def read_reference(layer: SafetensorsFile, vocabulary: int, positions: int | None) -> ReferenceRows:
    """Read the rows of a layer whose digest was checked.

    Args:
        vocabulary: the number of tokens of the model.
        positions: the longest row that the model can read; None for the limit of the format.

    Raises:
        PackageError: `reference`: a tensor is missing, has another shape or dtype, or a value is
            out of range.
    """
    if set(layer.names) != set(_NAMES):
        raise _refused(f"has the tensors {sorted(layer.names)!r:.200}, not {sorted(_NAMES)}")
    ids_NT, spans_N2, kinds_N2, named_RS = (_whole(layer, name) for name in _NAMES[:4])
    probabilities = layer.tensor("named_probabilities")
    if probabilities.dtype != "F16" or len(probabilities.shape) != 2:
        raise _refused("has probabilities that are not F16 [targets, tokens]")
    probability_RS = probabilities.float32()
    number, length = ids_NT.shape
    if not (2 <= number <= MOST_ROWS and 2 <= length <= MOST_TOKENS):
        raise _refused(f"has {number} rows of {length} tokens, not 2 to {MOST_ROWS} of 2 to {MOST_TOKENS}")
    if spans_N2.shape != (number, 2) or kinds_N2.shape != (number, 2) or kinds_N2.max() > 1:
        raise _refused("has spans or kinds of another number of rows, or a kind that is not 0 or 1")
    begin_N, end_N = spans_N2.T
    # Nothing predicts the first token of a row, so it is no target.
    if not ((begin_N >= 1) & (begin_N < end_N) & (end_N <= length)).all():
        raise _refused("has a span of targets outside its row")
    if ids_NT[np.arange(length) >= end_N[:, None]].any():
        raise _refused("has tokens after the end of a row")
    # This limits the time that the reference adds to each training.
    if int(end_N.sum()) > MOST_TOGETHER:
        raise _refused(f"has {end_N.sum()} tokens, more than {MOST_TOGETHER}")
    if positions is not None and int(end_N.max()) > positions:
        raise _refused(f"has a row of {end_N.max()} tokens; the model reads {positions}")
    chat_N, pulls_N = (column_N.astype(np.bool_) for column_N in kinds_N2.T)
    # Training needs rows to pull, and other rows to measure with.
    if not pulls_N.any() or pulls_N.all():
        raise _refused("lacks rows that pull, or rows that measure")
    targets = int((end_N - begin_N)[pulls_N].sum())
    # A tiny vocabulary may have fewer than `NAMED_TOKENS` tokens.
    wanted = (targets, min(NAMED_TOKENS, vocabulary))
    if named_RS.shape != probability_RS.shape or named_RS.shape != wanted:
        raise _refused(
            f"has named tokens of shape {list(named_RS.shape)} and probabilities of shape "
            f"{list(probability_RS.shape)}, not {list(wanted)}"
        )
    if max(int(ids_NT.max()), int(named_RS.max())) >= vocabulary:
        raise _refused(f"has a token outside the vocabulary of {vocabulary}")
    if (np.diff(np.sort(named_RS, axis=1), axis=1) == 0).any():
        raise _refused("names a token twice at one target")
    # A NaN fails both comparisons.
    if not (probability_RS >= 0).all() or not (probability_RS.sum(axis=1) <= _LARGEST_SUM).all():
        raise _refused("has probabilities below 0, or of more than 1 together")
    return ReferenceRows(
        ids_NT=ids_NT,
        begin_N=begin_N,
        end_N=end_N,
        chat_N=chat_N,
        pulls_N=pulls_N,
        named_RS=named_RS,
        probability_RS=probability_RS,
    )


def _whole(layer: SafetensorsFile, name: str) -> NDArray[np.int64]:
    tensor = layer.tensor(name)
    wanted = "U8" if name == "kinds" else "U32"
    if tensor.dtype != wanted or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise _refused(f"has {name} as {tensor.dtype} {list(tensor.shape)}, not {wanted} of two dimensions")
    numbers: NDArray[np.int64] = tensor.data.view("u1" if wanted == "U8" else "<u4").astype(np.int64)
    return numbers.reshape(tensor.shape)


def _refused(why: str) -> PackageError:
    return PackageError("reference", f"The reference of the package {why}.")
