"""Calibrated rounding: SignRound of Intel's auto-round.

    w' = scale * clip(rint(w / scale + v), -8, 7)

A block is a decoder layer. On calibration text, SignRound measures the error of a block's output. It moves
`v` in [-0.5, 0.5] and the range of each group by the sign of that error's gradient (Cheng et al. 2023,
"Optimize Weight Rounding via Signed Gradient Descent"). Codes have no zero point. Each group of 128 weights
of a row has one float16 scale. ADR 13 says why we chose this method.

Scales are not negative, so a package can store the result in the scheme int4.

Shapes: N = rows, K = columns, G = groups of a row, Q = sequences, T = tokens of a sequence.
"""

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from permille.errors import InputError
from permille.quantization import dequantize
from permille.quantization.source import pack
from permille.quantization.types import QuantizedTensor, Scheme, scales_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP_SIZE = 128
ITERATIONS = 200
"""Number of steps for each block. It is the default of auto-round."""

BATCH_SIZE = 8


def rounded_int4(
    model: "PreTrainedModel",
    names: Sequence[str],
    sequences_QT: NDArray[np.int64],
    *,
    iterations: int = ITERATIONS,
) -> dict[str, QuantizedTensor]:
    """Round the linear weights of the blocks to int4. The model's own weights are lost.

    Args:
        names: the parameters to round.
        sequences_QT: calibration text, [Q, T] token ids.

    Raises:
        InputError: auto-round did not change one of the weights, or made a weight that is not the product
            of a code and a scale.
    """
    tuned = _tuned(model, names, sequences_QT, iterations)
    return {
        name: _int4(
            name,
            _array(tuned.get_parameter(name)),
            _array(cast("torch.Tensor", tuned.get_submodule(name.rpartition(".")[0]).scale)),
        )
        for name in names
    }


def _int4(name: str, w_NK: NDArray[np.float32], scale: NDArray[np.float32]) -> QuantizedTensor:
    """Return codes and scales that decode to the weight, bit for bit."""
    rows, columns = w_NK.shape
    scale_NG = scale.reshape(rows, -1)
    # The last group of a row may be shorter.
    scale_NK = np.repeat(scale_NG, GROUP_SIZE, axis=1)[:, :columns]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # A group of zeros has scale 0. Its quotients are NaN, and its codes become 0.
        code_NK = np.clip(np.nan_to_num(np.rint(w_NK / scale_NK)), -8, 7)
    found = QuantizedTensor(
        scheme=Scheme.INT4,
        shape=(rows, columns),
        group_size=GROUP_SIZE,
        # FORMAT 4.2: int4 stores code + 8.
        packed=pack((code_NK + 8).astype(np.uint8).reshape(-1)),
        scales=scale_NG.copy(),
    )
    if scale_NG.shape != scales_shape(Scheme.INT4, found.shape, GROUP_SIZE) or scale_NG.min() < 0:
        raise InputError(
            f"auto-round gave {name} scales of shape {scale_NG.shape} with minimum {scale_NG.min()}. "
            "Each group needs one scale that is not negative."
        )
    # Codes are recovered from decoded weights, so decoding them must give the same bits.
    if not np.array_equal(dequantize(found), w_NK):
        raise InputError(f"auto-round made weights in {name} that are not codes times scales.")
    return found


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().float().numpy()
    return found


def _tuned(
    model: "PreTrainedModel",
    names: Sequence[str],
    sequences_QT: NDArray[np.int64],
    iterations: int,
) -> torch.nn.Module:
    """Return the model with rounded weights. Each linear has its scales in the attribute `scale`."""
    auto_round, tokenizer = _library()
    # Keep copies, because the library changes the weights in place.
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    dataset = [{"input_ids": torch.from_numpy(tokens_T[None].copy())} for tokens_T in sequences_QT]
    with _quiet():
        tuned, _ = auto_round(
            model,
            tokenizer,
            scheme="W4A16",
            bits=4,
            group_size=GROUP_SIZE,
            sym=True,
            # This type has positive scales. With "int", auto-round would leave out every matrix whose sides
            # are not multiples of 32.
            data_type="int_sym_gptq",
            scale_dtype="fp16",
            dataset=dataset,
            iters=iterations,
            seqlen=sequences_QT.shape[1],
            nsamples=len(dataset),
            batch_size=min(BATCH_SIZE, len(dataset)),
            device_map="cpu",
            amp=False,
            enable_torch_compile=False,
            seed=0,
        ).quantize()
    found: torch.nn.Module = tuned
    # auto-round leaves some layers out without an error, and their weights would pass for calibrated ones.
    if same := [
        name for name in names if before[name].any() and torch.equal(found.get_parameter(name), before[name])
    ]:
        raise InputError(f"auto-round did not change {same[0]}.")
    return found


def _library() -> tuple[Any, Any]:
    """Return auto-round's entry point, and a tokenizer for it.

    auto-round requires a tokenizer even if it is given token ids. The tokenizer made here has no padding
    token, because auto-round would mask a padding token out of the text.
    """
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return AutoRound, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's progress bars and log lines."""
    logger = logging.getLogger("autoround")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
