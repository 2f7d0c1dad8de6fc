"""Weights rounded with the outputs of their block in view: SignRound of Intel's auto-round.

    w' = scale * clip(rint(w / scale + v), -8, 7)

`v` in [-0.5, 0.5] and the range of each group move by the sign of the gradient of the error that a block's
output has on calibration text (Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent").
Symmetric, one float16 scale for 128 weights of a row. Why this one of the calibrated methods, and how it is
called: docs/adr/0125.
"""

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from permille.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP_SIZE = 128
ITERATIONS = 200
"""Steps for each block, the library's default."""

BATCH_SIZE = 8


def rounded(
    model: "PreTrainedModel",
    names: Sequence[str],
    sequences_NT: NDArray[np.int64],
    *,
    iterations: int = ITERATIONS,
) -> dict[str, NDArray[np.float32]]:
    """What the linear weights of the blocks decode to. The model's own weights are gone afterwards.

    Args:
        names: parameters that have to come out in four bits.
        sequences_NT: calibration text, [N, T] token ids.

    Raises:
        InputError: auto-round is not installed, or left one of the weights as it was.
    """
    auto_round, tokenizer = _library()
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    dataset = [{"input_ids": torch.from_numpy(tokens_T[None].copy())} for tokens_T in sequences_NT]
    with _quiet():
        tuned, _ = auto_round(
            model,
            tokenizer,
            scheme="W4A16",
            bits=4,
            group_size=GROUP_SIZE,
            sym=True,
            # By this name, since under "int" it leaves every matrix out whose sides are no multiples of 32.
            data_type="int_sym",
            scale_dtype="fp16",
            dataset=dataset,
            iters=iterations,
            seqlen=sequences_NT.shape[1],
            nsamples=len(dataset),
            batch_size=min(BATCH_SIZE, len(dataset)),
            device_map="cpu",
            amp=False,
            enable_torch_compile=False,
            seed=0,
        ).quantize()
    parameters = dict(tuned.named_parameters())
    decoded = {name: parameters[name].detach().float().numpy().copy() for name in names}
    if same := [name for name in names if before[name].any() and torch.equal(parameters[name], before[name])]:
        raise InputError(f"expected auto-round to quantize {same[0]}, got it as it was")
    return decoded


def _library() -> tuple[Any, Any]:
    """The entry, and a tokenizer, which it insists on though it is given tokens. One without a padding token:
    the library would mask that token out of the text."""
    try:
        from auto_round import AutoRound
    except ImportError as exc:
        raise InputError(
            'expected auto-round, which is not installed: pip install "permille[evaluate]"'
        ) from exc
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return AutoRound, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars and lines."""
    logger = logging.getLogger("autoround")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
