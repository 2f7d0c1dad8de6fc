"""Float32 kernels for the work between the products of a layer: norm, rotation, activation, attention.

Two more kernels multiply one hidden state by the output head. Each function returns whether it did the work.
Without the library, or for arrays in a layout that the kernel does not accept, it returns False and changes
nothing. The caller then computes the same in numpy. The results are equal up to rounding. Kernels release the
interpreter's lock and use one thread.

# Legend: M tokens, H width, T new tokens, S new and earlier tokens, A heads, B key-value heads, D numbers of
a head, E = half of the rotated numbers of a head, N, K = rows and columns of the output head.
"""

import numpy as np
from numpy.typing import NDArray

from permille.native.library import load
from permille.tensors import Q8_0_BYTES, Q8_0_WEIGHTS

Array = NDArray[np.float32]

# The number of floats in the widest register. Scratch memory is padded to a multiple of it.
_STEP = 16


def rms_norm(x_MH: Array, weight_H: Array, epsilon: float, out: Array) -> bool:
    """Set `out = w x / sqrt(mean(x^2) + epsilon)`. `out` may be x."""
    library = load()
    arrays = (x_MH, weight_H, out)
    if library is None or not all(_is_plain(array) for array in arrays) or x_MH.shape != out.shape:
        return False
    rows, width = x_MH.shape
    if weight_H.shape != (width,):
        return False
    library.call("rms_norm", x_MH, rows, width, weight_H, np.array([epsilon], np.float32), out)
    return True


def rotate(x_MAD: Array, cosine_ME: Array, sine_ME: Array) -> bool:
    """Rotate the first 2E numbers of every head by its token's angles, in place."""
    library = load()
    tokens, heads, head = x_MAD.shape
    half = cosine_ME.shape[1]
    # 2E may be less than D, because some families rotate only a part of a head.
    fits = cosine_ME.shape == sine_ME.shape == (tokens, half) and 2 * half <= head
    plain = _is_plain(cosine_ME) and _is_plain(sine_ME) and _has_plain_heads(x_MAD)
    if library is None or not fits or not plain:
        return False
    token_step, head_step = _steps(x_MAD)
    library.call("rotate", x_MAD, tokens, token_step, heads, head_step, half, cosine_ME, sine_ME)
    return True


_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def activate(kind: str, x: Array) -> bool:
    """Apply `x / (1 + e^-x)` ("silu") or the tanh form of GELU ("gelu_tanh"), in place."""
    library = load()
    if library is None or kind not in _ACTIVATIONS or not _is_plain(x):
        return False
    library.call("activate", x, x.size, _ACTIVATIONS[kind])
    return True


def attention(
    q_TAD: Array,
    k_SBD: Array,
    v_SBD: Array,
    scale: float,
    window: int | None,
    cap: float | None,
    out_TAD: Array,
) -> bool:
    """Compute causal attention of the last T of S tokens. Head a reads key-value head a // (A / B).

    Args:
        window: the number of tokens that a token attends to, itself included. None sets no limit.
        cap: scores become `cap * tanh(score / cap)`. None leaves them as they are.
    """
    library = load()
    arrays = (q_TAD, k_SBD, v_SBD, out_TAD)
    if library is None or not all(_has_plain_heads(array) for array in arrays):
        return False
    queries, heads, head = q_TAD.shape
    keys, kv_heads, _ = k_SBD.shape
    fits = k_SBD.shape == v_SBD.shape == (keys, kv_heads, head) and out_TAD.shape == q_TAD.shape
    if not fits or heads % kv_heads or not 0 < queries <= keys or cap == 0:
        return False
    # For the kernel, 0 means no cap. A cap of 0 was refused above.
    numbers = np.array([scale, cap or 0.0], np.float32)
    behind = min(window or 0, keys)  # a config's window may be larger than the kernel's integers
    if queries == 1:
        library.call(
            # This kernel reads each key and value once, in place. The kernel for several queries first copies
            # keys and values into a better order, which all queries share.
            "attention_one", q_TAD, _steps(q_TAD)[1], k_SBD, *_steps(k_SBD), v_SBD, *_steps(v_SBD),
            out_TAD, _steps(out_TAD)[1], keys, heads, kv_heads, head, behind, numbers,
            np.empty(keys, np.float32),
        )  # fmt: skip
        return True
    wide, deep = -(-keys // _STEP) * _STEP, -(-head // _STEP) * _STEP
    library.call(
        "attention", q_TAD, *_steps(q_TAD), k_SBD, *_steps(k_SBD), v_SBD, *_steps(v_SBD),
        out_TAD, *_steps(out_TAD), queries, keys, heads, kv_heads, head, behind, numbers,
        np.empty((head + 4) * wide + keys * deep, np.float32),
    )  # fmt: skip
    return True


def product_bf16(x_K: Array, w_NK: NDArray[np.uint16], out_N: Array) -> bool:
    """Set `out = W x` for rows of bfloat16, which are converted to float32 in registers."""
    library = load()
    plain = _is_plain(x_K) and _is_plain(out_N) and w_NK.dtype == np.uint16 and w_NK.flags.c_contiguous
    if library is None or not plain or w_NK.shape != (len(out_N), len(x_K)):
        return False
    library.call("product_bf16", x_K, w_NK, *w_NK.shape, out_N, np.empty_like(x_K))
    return True


def product_q8_0(x_K: Array, w_NR: NDArray[np.uint8], out_N: Array) -> bool:
    """Set `out = W x` for rows of Q8_0: K / 32 blocks of 34 bytes each, decoded in registers."""
    library = load()
    plain = _is_plain(x_K) and _is_plain(out_N) and w_NR.dtype == np.uint8 and w_NR.flags.c_contiguous
    shape = (len(out_N), len(x_K) // Q8_0_WEIGHTS * Q8_0_BYTES)
    if library is None or not plain or len(x_K) % Q8_0_WEIGHTS or w_NR.shape != shape:
        return False
    library.call("product_q8_0", x_K, w_NR, len(out_N), len(x_K), out_N)
    return True


def _is_plain(array: Array) -> bool:
    return array.dtype == np.float32 and array.flags.c_contiguous


def _has_plain_heads(array: Array) -> bool:
    """Return whether an array is [tokens, heads, numbers], and the numbers of a head are contiguous."""
    return (
        array.ndim == 3
        and array.dtype == np.float32
        and array.strides[2] == 4
        and all(stride >= 0 and stride % 4 == 0 for stride in array.strides)
    )


def _steps(array: Array) -> tuple[int, int]:
    """Return the distances from token to token and from head to head, in floats."""
    return array.strides[0] // 4, array.strides[1] // 4
