"""Interface of engines. It separates training and generation from the matrix code.

An engine holds one package on one device. The caller passes the sparse values (the trained weights), often
several variants of them that differ by a perturbation. An engine knows nothing of seeds, directions or
optimizers. A loss may be NaN or infinite. An engine returns such a loss and raises no error.

Arrays: V variants, K masked weights of the whole package (tensors concatenated in `tensor_id` order),
B sequences, T positions.

Every implementation passes the rules of `tests/unit/engines/conformance.py`: `RULES`, or `LOSS_RULES` if it
computes only losses.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from permille.engines.key_values import KeyValues
from permille.engines.sampling import TokenSampling
from permille.errors import InputError
from permille.zo.estimators import Batch, Differentiable, LossEngine

REVERSE_PASSES = 3
"""A gradient takes three passes through a layer: forward, forward again (which recomputes the intermediate
results), and backward."""


class EngineInfo(TypedDict):
    """Description of an engine in a report.

    A resumed run computes the same bits as an uninterrupted one only if its engine has the same description.
    """

    name: str
    version: str
    compute_dtype: str
    threads: int
    device: str


class Engine(LossEngine, Protocol):
    """A loaded package that computes losses and text.

    Calls from several threads are safe. They run one at a time.
    """

    @property
    def layer_passes(self) -> int:
        """Count how often a sequence has passed through a decoder layer so far, forward or backward.

        The passes of all variants add up. A pass that variants share counts once. Some results pages divide
        this number by the number of layers, and call the quotient row passes.
        """

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Return the loss of each target token, float32 [targets], row-major in the batch."""

    def generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: TokenSampling
    ) -> Iterator[int]:
        """Yield new token ids one by one, up to a stop id, the token limit, or the model's last position.

        For example, up to 20 tokens of the base model:

            list(engine.generate(package.values(), prompt_ids, TokenSampling(max_new_tokens=20)))

        Args:
            values_K: float32 [K].
            prompt_ids: int64 [T], at least one id.
            sampling: the settings.

        Raises:
            InputError: an argument is out of range. The call itself raises this error, before any `next`.
                `next` raises an InputError if the logits are not finite.
        """

    def info(self) -> EngineInfo:
        """Return name, version, compute dtype, threads and device."""


class GradientEngine(Engine, Differentiable, Protocol):
    """An engine that also computes the gradient of all masked weights."""


class RememberingEngine(Engine, Protocol):
    """An engine whose texts can begin with stored keys and values. Get it from `remembering`."""

    def read(self, values_K: NDArray[np.float32], ids: NDArray[np.int64]) -> KeyValues:
        """Return the keys and values of a text, together with those that it follows.

        Args:
            values_K: float32 [K].
            ids: int64 [T], at least one id. With `after`, these are the tokens that follow.

        Raises:
            InputError: an argument is out of range.
        """

    def after(self, known: KeyValues, bos: Sequence[int] = ()) -> Self:
        """Return an engine whose rows and prompts continue at position `len(known)`.

        It shares the model, and `known` replaces what this engine itself continues. It computes losses and
        text, and no gradients. For example, for a model that begins every text with the token 2:

            engine.after(memory, bos=(2,)).token_losses(values_K, batch)

        Args:
            known: the keys and values.
            bos: the tokens that rows and prompts begin with. The last tokens of `known` take their place and
                are read again, so BOS stands only at position 0. Rows that begin otherwise stay as they are.

        Raises:
            InputError: `known` does not fit the model, or is too long for it.
        """

    def generate(
        self,
        values_K: NDArray[np.float32],
        prompt_ids: NDArray[np.int64],
        sampling: TokenSampling,
        keep: Callable[[KeyValues], None] | None = None,
    ) -> Iterator[int]:
        """See `Engine.generate`.

        Args:
            values_K: float32 [K].
            prompt_ids: int64 [T], at least one id.
            sampling: the settings.
            keep: is called at the end, or when the caller stops, with the keys and values of the whole text:
                what it follows, the prompt, and the new tokens except for the last one.
        """


def remembering(engine: Engine) -> RememberingEngine:
    """Return the engine, if its texts can begin with stored keys and values.

    Raises:
        InputError: the engine always reads a text from its first token on.
    """
    if not hasattr(engine, "after"):
        raise InputError(
            f"The engine {engine.info()['name']} cannot begin a text with stored keys and values. Use the "
            "engine light."
        )
    return cast("RememberingEngine", engine)
