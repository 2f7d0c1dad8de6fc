"""The engine of an exported program: losses of variants by ExecuTorch's runtime, without torch.

An export fixes the shape of a program, so a call is cut into passes of this shape. Each row of a pass is a
pair of a variant and a sequence. The program also computes unused rows, and the engine ignores their losses.
Attention is causal, so padding changes no loss.

This engine computes neither gradients nor text. Train with a method that needs only losses (`zeroth-order`),
and use another engine to generate text.

# Legend: V variants, B sequences, T tokens, R rows of the program, S pairs of variant and sequence.
"""

import threading
from collections.abc import Iterator
from importlib import metadata

import numpy as np
from numpy.typing import NDArray

from permille.engines.executorch.program import Program, ProgramShape
from permille.engines.inputs import ModelLimits, check_batch, check_values
from permille.engines.interface import EngineInfo
from permille.engines.light.threads import available_processors
from permille.engines.sampling import TokenSampling
from permille.errors import InputError, PackageError
from permille.package.reader import Package
from permille.version import __version__
from permille.zo.estimators import Batch

Array = NDArray[np.float32]


class ExecutorchEngine:
    """See `permille.engines.interface.Engine` for what each method promises.

    Attributes:
        shape: the sizes of one pass of the program.
    """

    def __init__(self, package: Package, *, threads: int | None = None) -> None:
        """Map the program of a package.

        Args:
            package: the package.
            threads: the number of threads of the runtime in the whole process. None takes one for each
                processor that the process may use.

        Raises:
            InputError: the package has no program, the runtime is not installed, the library that connects to
                it is not built, or the runtime refuses the program.
            PackageError: `program-binding`: the program belongs to another package. `blob-missing`: the
                program was not fetched.
        """
        if threads is not None and threads < 1:
            raise InputError(f"threads must be at least 1, not {threads}.")
        self._threads = threads or available_processors()
        path = package.program()
        if path is None:
            raise InputError("The package has no program. Make one: `permille exports create`.")
        self._program = Program(path, threads=self._threads)
        # A program stores the digest of the package that it was made from. `parent()` is that package,
        # without later additions such as the program itself.
        digest, parent = np.zeros(32, np.uint8), package.manifest.parent().digest
        self._program.run("package", (), digest)
        if (found := f"sha256:{digest.tobytes().hex()}") != parent:
            raise PackageError(
                "program-binding",
                f"The program belongs to package {found}, not to {parent}. Export it again.",
            )
        bits = np.zeros(1, np.uint8)
        self._program.run("activation_bits", (), bits)
        self._dtype = "int8-activations" if bits[0] == 8 else "float32"
        (variants, k), (rows, tokens) = (self._program.input_shape("forward", index) for index in (0, 2))
        if k != package.k:
            raise PackageError(
                "program-binding", f"The program takes {k} masked weights, and the package has {package.k}."
            )
        self.shape = ProgramShape(variants=variants, rows=rows, tokens=tokens)
        vocabulary = package.config["vocab_size"]
        self._limits = ModelLimits(k=k, vocabulary=vocabulary, positions=tokens)
        self._lock = threading.Lock()
        self._layers = int(package.config["num_hidden_layers"])
        self._layer_passes = 0

    @property
    def k(self) -> int:
        """Number of masked weights of the package."""
        return self._limits.k

    @property
    def layer_passes(self) -> int:
        """Count passes of one sequence through one decoder layer so far.

        A program computes all rows of each pass, so unused rows count, too.
        """
        return self._layer_passes

    def info(self) -> EngineInfo:
        """Return name, versions, threads and device."""
        return EngineInfo(
            name="executorch",
            version=f"permille {__version__}, executorch {metadata.version('executorch')}",
            compute_dtype=self._dtype,
            threads=self._threads,
            device="cpu",
        )

    def losses(self, values_VK: Array, batch: Batch) -> Array:
        """Return the mean loss over the batch's targets for each variant, float32 [V]."""
        check_values(values_VK, self._limits)
        batch = check_batch(batch, self._limits)
        # Losses start at the second token, because the first token has no earlier token to predict it.
        losses_VBT = self._losses(values_VK, batch)
        with np.errstate(all="ignore"):
            means_V: Array = (
                losses_VBT[:, batch.target_BT[:, 1:]].mean(1, dtype=np.float64).astype(np.float32)
            )
        return means_V

    def token_losses(self, values_K: Array, batch: Batch) -> Array:
        """Return the loss of each target token, float32 [targets], in row-major order of the batch."""
        check_values(values_K[None], self._limits)
        batch = check_batch(batch, self._limits)
        losses_R: Array = self._losses(values_K[None], batch)[0][batch.target_BT[:, 1:]]
        return losses_R

    def generate(
        self,
        values_K: Array,  # noqa: ARG002
        prompt_ids: NDArray[np.int64],  # noqa: ARG002
        sampling: TokenSampling,  # noqa: ARG002
    ) -> Iterator[int]:
        """Refuse to generate text, because a program computes only losses.

        Raises:
            InputError: always.
        """
        raise InputError('The engine "executorch" writes no text. Choose the engine "auto".')

    def _losses(self, values_VK: Array, batch: Batch) -> Array:
        """Return the losses [V, B, T - 1] of a checked batch."""
        sequences, tokens = batch.input_ids_BT.shape
        rows = self.shape.rows
        # Arrays of the program's fixed sizes, for all passes of the call.
        ids_RT = np.zeros((rows, self.shape.tokens), np.int64)
        loss_RT = np.zeros((rows, self.shape.tokens - 1), np.float32)
        values = np.zeros((self.shape.variants, self.k), np.float32)
        found = np.empty((len(values_VK) * sequences, tokens - 1), np.float32)
        with self._lock:
            for first, last in self._passes(len(values_VK), sequences):
                pair = np.arange(first, last)
                variant, row = pair // sequences, pair % sequences
                chosen = values_VK[variant[0] : variant[-1] + 1]
                # Variants of an earlier pass may remain after `chosen`. No row of this pass refers to them.
                values[: len(chosen)] = chosen
                variant_R = np.zeros(rows, np.int64)
                variant_R[: len(pair)] = variant - variant[0]
                ids_RT[:] = 0
                ids_RT[: len(pair), :tokens] = batch.input_ids_BT[row]
                # The program also computes the unused rows.
                self._layer_passes += rows * self._layers
                self._program.run("forward", (values, variant_R, ids_RT), loss_RT)
                found[first:last] = loss_RT[: len(pair), : tokens - 1]
        return found.reshape(len(values_VK), sequences, -1)

    def _passes(self, variants: int, sequences: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of pairs. The pairs are ordered by variant, and each range fits into one pass."""
        first = 0
        while first < variants * sequences:
            # A pass has at most `self.shape.variants` variants. It may start in the middle of a variant's
            # sequences.
            most = (first // sequences + self.shape.variants) * sequences
            last = min(first + self.shape.rows, most, variants * sequences)
            yield first, last
            first = last
