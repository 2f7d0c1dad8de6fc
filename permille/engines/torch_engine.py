"""The reference engine: a package's forward pass on torch, on a CPU or a CUDA device, in float32 or bfloat16.

Losses are float32 whatever the compute dtype: only the decoder runs in bfloat16. Their mean is taken in
float64 over token losses, so it does not depend on how variants and sequences were grouped; the token
losses themselves agree to rounding when a batch is grouped differently (1e-5), and to the bit when the same
call is repeated on the same build, device and number of threads.

# Legend: V variants, K masked weights, Q directions, B sequences, T tokens, H hidden size, R target tokens.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, jvp, vmap

import permille
from permille.engines.assembly import assemble
from permille.engines.inputs import check_batch, check_directions, check_prompt, check_values, row_parts
from permille.engines.interface import EngineInfo
from permille.engines.sampling import Sampling, next_token
from permille.errors import InputError, OperatorError
from permille.package.reader import Package
from permille.zo.estimators import Batch

# Tokens of all variants together in one forward pass: bounds the activations.
DEFAULT_MAX_TOKENS = 8192
# Dequantized weights that are kept. More makes generation faster; training needs it only for small models.
DEFAULT_CACHE_BYTES = 512 << 20


class ComputeDtype(StrEnum):
    """What the decoder computes in. FLOAT64 is for tests: a reference for derivatives."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


class TorchEngine:
    """See `permille.engines.interface.Engine` for what each method promises."""

    def __init__(
        self,
        package: Package,
        *,
        device: str = "cpu",
        compute_dtype: str = ComputeDtype.FLOAT32,
        threads: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """Map the package and build its model; nothing is dequantized yet.

        Args:
            threads: torch's threads for the whole process; None leaves them as they are.
            max_tokens: bound on variants * sequences * tokens of one forward pass; a call beyond it runs in
                parts.
            cache_bytes: bound on dequantized weights that are kept. 0 keeps none.

        Raises:
            InputError: an unknown model family or compute dtype.
            OperatorError: the device is not there.
            PackageError: the package's tensors are not those of its model.
        """
        if compute_dtype not in set(ComputeDtype):
            raise InputError(f"expected compute dtype {', '.join(ComputeDtype)}; got {compute_dtype!r}")
        if max_tokens < 1:
            raise InputError(f"expected max_tokens of at least 1, got {max_tokens}")
        if threads is not None and threads < 1:
            raise InputError(f"expected at least 1 thread, got {threads}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._compute_dtype = ComputeDtype(compute_dtype)
        self._dtype: torch.dtype = getattr(torch, self._compute_dtype)
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._model = assemble(package, device=self._device, dtype=self._dtype, cache_bytes=cache_bytes)

    @property
    def k(self) -> int:
        """Number of masked weights of the package."""
        return self._model.limits.k

    def info(self) -> EngineInfo:
        """Name, versions, compute dtype, threads and device."""
        return EngineInfo(
            name="torch",
            version=f"permille {permille.__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}",
            compute_dtype=self._compute_dtype.value,
            threads=torch.get_num_threads(),
            device=str(self._device),
        )

    def losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Mean loss over the batch's targets for each variant, float32 [v]."""
        check_values(values_VK, self._model.limits)
        token_losses_VR = self._token_losses(values_VK, check_batch(batch, self._model.limits))
        with np.errstate(invalid="ignore", over="ignore"):
            losses_V: NDArray[np.float32] = token_losses_VR.mean(axis=1, dtype=np.float64).astype(np.float32)
        return losses_V

    def token_losses(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """Loss of each target token, float32 [targets], in row-major order of the batch."""
        check_values(values_K[None], self._model.limits)
        losses_1R = self._token_losses(values_K[None], check_batch(batch, self._model.limits))
        losses_R: NDArray[np.float32] = losses_1R[0]
        return losses_R

    def directional_derivatives(
        self, values_K: NDArray[np.float32], directions_QK: NDArray[np.float32], batch: Batch
    ) -> tuple[float, NDArray[np.float64]]:
        """`grad f . z_i` by forward-mode: one primal pass for all directions, and a tangent pass for each."""
        check_values(values_K[None], self._model.limits)
        directions_QK = check_directions(directions_QK, self._model.limits)
        batch = check_batch(batch, self._model.limits)
        length = batch.input_ids_BT.shape[1]
        rows = min(len(batch.input_ids_BT), max(1, self._max_tokens // (2 * length)))
        queries = max(1, self._max_tokens // (rows * length) - 1)
        with self._lock, torch.no_grad():
            value_K = self._tensor(values_K)
            sums = [
                np.sum(
                    [
                        self._derivative_sums(value_K, self._tensor(part_QK), part)
                        for part in row_parts(batch, rows)
                    ],
                    axis=0,
                )
                for part_QK in _split(directions_QK, queries)
            ]
        targets = int(batch.target_BT.sum())
        return float(sums[0][0] / targets), np.concatenate([part[1:] for part in sums]) / targets

    def generate(
        self,
        values_K: NDArray[np.float32],
        prompt_ids: NDArray[np.int64],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield new token ids one by one, with a key-value cache."""
        check_values(values_K[None], self._model.limits)
        check_prompt(prompt_ids, self._model.limits)
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop_ids=stop_ids
        )
        return self._generate(values_K.copy(), prompt_ids.copy(), sampling)

    def _generate(
        self, values_K: NDArray[np.float32], prompt_ids: NDArray[np.int64], sampling: Sampling
    ) -> Iterator[int]:
        rng = np.random.Generator(np.random.Philox(sampling.seed))
        value_1K = self._tensor(values_K[None])
        positions = self._model.limits.positions
        room = sampling.max_new_tokens
        if positions is not None:
            room = min(room, positions - len(prompt_ids))
        ids, cache = prompt_ids, None
        for _ in range(room):
            # Per token, so that a consumer that pauses does not keep the engine from others.
            with self._lock, torch.no_grad():
                logit_D, cache = self._next_logits(value_1K, ids, cache)
            token = next_token(logit_D, sampling, rng)
            if token in sampling.stop_ids:
                return
            yield token
            ids = np.array([token], dtype=np.int64)

    def _next_logits(
        self, value_1K: Tensor, ids: NDArray[np.int64], cache: Any
    ) -> tuple[NDArray[np.float32], Any]:
        """Logits after the last of `ids`, given the cache of what was before them."""
        embeds = self._embed(self._tensor(ids)[None])
        with self._model.overlay.using(value_1K):
            output = self._model.decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
        logits_1D = self._model.head.logits(output.last_hidden_state[:, -1])
        logit_D: NDArray[np.float32] = logits_1D[0].float().cpu().numpy()
        return logit_D, output.past_key_values

    def _token_losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """[v, R] for a checked batch, in parts of at most `max_tokens`."""
        sequences, length = batch.input_ids_BT.shape
        rows = min(sequences, max(1, self._max_tokens // length))
        variants = max(1, self._max_tokens // (rows * length))
        with self._lock, torch.no_grad():
            return np.concatenate(
                [
                    np.concatenate(
                        [self._part_losses(self._tensor(part_VK), part) for part in row_parts(batch, rows)],
                        axis=1,
                    )
                    for part_VK in _split(values_VK, variants)
                ]
            )

    def _part_losses(self, values_VK: Tensor, batch: Batch) -> NDArray[np.float32]:
        """[v, R] in one forward pass."""
        variants = len(values_VK)
        with self._model.overlay.using(values_VK):
            hidden_VRH = self._hidden(batch, variants)
        target_R = self._targets(batch)
        losses = self._model.head.losses(hidden_VRH.flatten(0, 1), target_R.repeat(variants))
        token_losses_VR: NDArray[np.float32] = losses.view(variants, -1).float().cpu().numpy()
        return token_losses_VR

    def _derivative_sums(self, value_K: Tensor, directions_QK: Tensor, batch: Batch) -> NDArray[np.float64]:
        """Sum over the part's targets of the token losses, then of their derivative along each direction,
        [1 + q].

        A derivative is the tangent of the hidden state times the head's gradient, which all directions share.
        """

        def hidden(value_K: Tensor) -> Tensor:
            with self._model.overlay.using(value_K[None], differentiated=True):
                return self._hidden(batch, 1)[0]

        def pushed(direction_K: Tensor) -> Any:
            return jvp(hidden, (value_K,), (direction_K,))

        with _eager_attention(self._model.config):
            # The stubs of vmap know no axis None: the primal has no axis of directions.
            hidden_RH, tangent_QRH = vmap(pushed, out_dims=(None, 0))(directions_QK)  # type: ignore[arg-type]
        loss_R, gradient_RH = self._model.head.gradients(hidden_RH, self._targets(batch))
        products_QRH = tangent_QRH.to(gradient_RH.dtype) * gradient_RH
        sums_Q = products_QRH.sum(dim=(1, 2), dtype=torch.float64)
        both: NDArray[np.float64] = torch.cat([loss_R.double().sum()[None], sums_Q]).cpu().numpy()
        return both

    def _hidden(self, batch: Batch, variants: int) -> Tensor:
        """Hidden states [v, R, H] before each target, for every variant in the overlay.

        No padding mask: padding is on the right and attention causal, so no real token ever looks at it.
        """
        embedded = self._embed(self._tensor(batch.input_ids_BT))
        output = self._model.decoder(inputs_embeds=embedded.repeat(variants, 1, 1), use_cache=False)
        hidden_VBTH = output.last_hidden_state.unflatten(0, (variants, -1))
        row_R, column_R = (self._tensor(axis) for axis in np.nonzero(batch.target_BT))
        states_VRH: Tensor = hidden_VBTH[:, row_R, column_R - 1]
        return states_VRH

    def _targets(self, batch: Batch) -> Tensor:
        return self._tensor(batch.input_ids_BT[batch.target_BT])

    def _embed(self, ids_BT: Tensor) -> Tensor:
        """Look tokens up in the table as stored, then widen: the table itself is never converted."""
        used_UH = self._model.embedding_DH[ids_BT.flatten()].to(self._dtype)
        places_BT = torch.arange(ids_BT.numel(), device=self._device).view(ids_BT.shape)
        embedded: Tensor = functional_call(self._model.embed, {"weight": used_UH}, (places_BT,))
        return embedded

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _split(rows: NDArray[np.float32], size: int) -> list[NDArray[np.float32]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@contextmanager
def _eager_attention(config: Any) -> Iterator[None]:
    """No fused attention has a forward-mode derivative. The modules read their config at each call."""
    usual = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = usual


def _device(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"expected device cpu, cuda or cuda:<index>, got {name!r}")
    device = torch.device(name)
    found = torch.cuda.device_count() if kind == "cuda" else 1
    if (device.index or 0) >= found:
        raise OperatorError(f"expected a CUDA device for {name!r}, torch {torch.__version__} finds {found}")
    return device
