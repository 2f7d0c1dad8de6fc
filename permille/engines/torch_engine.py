"""The reference engine: a package's forward pass on torch, on a CPU or a CUDA device, in float32 or bfloat16.

Losses are float32 whatever the compute dtype: only the decoder runs in bfloat16. Their mean is taken in
float64 over token losses, so it does not depend on how variants and sequences were grouped; the token
losses themselves agree to rounding when a batch is grouped differently (1e-5), and to the bit when the same
call is repeated on the same build, device and number of threads.

Sequences are packed: no layer computes padding, nor what comes after the last target. Below the first masked
layer everything is computed once for all variants, and kept where a prefix cache is given; above, once for
all variants that still agree.

# Legend: V variants, G groups of equal ones, K masked weights, Q directions, B sequences, T their tokens,
# M packed tokens, H hidden size, R target tokens.
"""

import json
import threading
import time
from collections.abc import Collection, Iterator
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
from permille.engines.inputs import check_batch, check_directions, check_prompt, check_values
from permille.engines.interface import EngineInfo
from permille.engines.layer_stack import Program, RunLayer
from permille.engines.overlay import FixedValues, Overlay
from permille.engines.packed_attention import Segments
from permille.engines.packed_batch import PackedBatch, packed_parts
from permille.engines.prefix_cache import PrefixCache, row_key
from permille.engines.sampling import Sampling, next_token
from permille.engines.sharing import LayerGroups, first_masked_layer, plan_sharing
from permille.errors import InputError, OperatorError
from permille.native.library import load
from permille.package.reader import Package
from permille.zo.estimators import Batch

# Tokens of all variants together in one forward pass bound the activations. On a CPU parts of 500 tokens and
# more were no slower than whole calls; a GPU wants more at a time.
CPU_TOKEN_BYTES = 4096
CUDA_MAX_TOKENS = 8192
# Dequantized weights are kept where compiled kernels decode them, at 1 to 2% of a step, of small models only:
# of a large one a few layers would be memory without use.
DEFAULT_CACHE_BYTES = 64 << 20
# Where torch decodes them, more is worth its memory: generation decodes every weight for every token.
SLOW_CACHE_BYTES = 512 << 20
# Fewer tokens than this are not taken as a part of their own for the sake of more directions.
_PRIMAL_TOKENS = 64


class ComputeDtype(StrEnum):
    """What the decoder computes in.

    FLOAT64 is for tests: a reference for derivatives. INT8_ACTIVATIONS is for experiments: float32, but
    linear layers see their inputs as int8 would hold them; as slow as float32.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8_ACTIVATIONS = "int8-activations"


class TorchEngine:
    """See `permille.engines.interface.Engine` for what each method promises."""

    def __init__(
        self,
        package: Package,
        *,
        device: str = "cpu",
        compute_dtype: str = ComputeDtype.FLOAT32,
        threads: int | None = None,
        max_tokens: int | None = None,
        cache_bytes: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Map the package and build its model; nothing is dequantized yet.

        Args:
            threads: torch's threads for the whole process; None leaves them as they are.
            max_tokens: bound on variants * sequences * tokens of one forward pass; a call beyond it runs in
                parts. None is 1024 in float32 and 2048 in bfloat16 on a CPU, 8192 on CUDA.
            cache_bytes: bound on dequantized weights that are kept. 0 keeps none; None is 64 MiB with
                compiled kernels on a CPU if that is all of them, and else none; 512 MiB without.
            prefix_cache: keeps hidden states before the first masked layer from call to call; without effect
                where the first layer is masked. It may be shared with other engines.

        Raises:
            InputError: an unknown model family or compute dtype.
            OperatorError: the device is not there.
            PackageError: the package's tensors are not those of its model.
        """
        if compute_dtype not in set(ComputeDtype):
            raise InputError(f"expected compute dtype {', '.join(ComputeDtype)}; got {compute_dtype!r}")
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"expected max_tokens of at least 1, got {max_tokens}")
        if threads is not None and threads < 1:
            raise InputError(f"expected at least 1 thread, got {threads}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _device(device)
        self._compute_dtype = ComputeDtype(compute_dtype)
        int8_inputs = self._compute_dtype is ComputeDtype.INT8_ACTIVATIONS
        self._dtype: torch.dtype = torch.float32 if int8_inputs else getattr(torch, self._compute_dtype)
        if max_tokens is None:
            on_cpu = self._device.type == "cpu"
            max_tokens = CPU_TOKEN_BYTES // self._dtype.itemsize if on_cpu else CUDA_MAX_TOKENS
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        if cache_bytes is None:
            cache_bytes = self._usual_cache(package)
        overlay = Overlay(self._device, self._dtype, int8_inputs=int8_inputs)
        self._model = assemble(package, overlay, cache_bytes=cache_bytes)
        self._first_masked = first_masked_layer(self._model.spans)
        self._prefix_cache = prefix_cache
        self._prefix_scope = (
            f"{package.digest} {self._first_masked} {json.dumps(self.info(), sort_keys=True)}"
        )
        self._no_values = torch.empty(1, 0, device=self._device)

    @property
    def k(self) -> int:
        """Number of masked weights of the package."""
        return self._model.limits.k

    def _usual_cache(self, package: Package) -> int:
        if self._device.type != "cpu" or load() is None:
            return SLOW_CACHE_BYTES
        weights = sum(rows * columns for rows, columns in (info.shape for info in package.manifest.tensors))
        return DEFAULT_CACHE_BYTES if weights * self._dtype.itemsize <= DEFAULT_CACHE_BYTES else 0

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
        # Short parts that all directions share, not few directions on long ones: a primal is computed once.
        shared = self._max_tokens // (1 + len(directions_QK))
        rows = max(1, shared, min(self._max_tokens // 2, _PRIMAL_TOKENS))
        with self._lock, torch.no_grad():
            value_K = self._tensor(values_K)
            parts = [
                self._derivative_sums(value_K, directions_QK, packed) for packed in packed_parts(batch, rows)
            ]
        means_Q1 = np.sum(parts, axis=0) / int(batch.target_BT.sum())
        return float(means_Q1[0]), means_Q1[1:]

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
        fixed = FixedValues(self._tensor(values_K))
        positions = self._model.limits.positions
        room = sampling.max_new_tokens
        if positions is not None:
            room = min(room, positions - len(prompt_ids))
        ids, cache = prompt_ids, None
        # transformers keeps `window - 1` tokens of a layer; for a window of 1 its slice keeps all of them.
        again = getattr(self._model.config, "sliding_window", None) == 1
        for _ in range(room):
            # Per token, so that a consumer that pauses does not keep the engine from others.
            with self._lock, torch.no_grad():
                logit_D, cache = self._next_logits(fixed, ids, cache)
            token = next_token(logit_D, sampling, rng)
            if token in sampling.stop_ids:
                return
            yield token
            if again:
                ids, cache = np.append(ids, token), None
            else:
                ids = np.array([token], dtype=np.int64)

    def _next_logits(
        self, fixed: FixedValues, ids: NDArray[np.int64], cache: Any
    ) -> tuple[NDArray[np.float32], Any]:
        """Logits after the last of `ids`, given the cache of what was before them."""
        embeds = self._embed(self._tensor(ids))
        with self._model.overlay.using(fixed.value_K[None], fixed=fixed):
            output = self._model.decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
        logits_1D = self._model.head.logits(output.last_hidden_state[:, -1])
        logit_D: NDArray[np.float32] = logits_1D[0].float().cpu().numpy()
        return logit_D, output.past_key_values

    def _token_losses(self, values_VK: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        """[v, R] for a checked batch, in parts of at most `max_tokens`."""
        with self._lock, torch.no_grad():
            parts = [self._part_losses(values_VK, packed) for packed in packed_parts(batch, self._max_tokens)]
            return np.concatenate(parts, axis=1)

    def _part_losses(self, values_VK: NDArray[np.float32], packed: PackedBatch) -> NDArray[np.float32]:
        """[v, R] for some sequences: what no value reaches once, then variants, as many as fit."""
        prefix_1MH = self._prefix_states(packed)
        together = max(1, self._max_tokens // packed.tokens)
        return np.concatenate(
            [self._variant_losses(part_VK, packed, prefix_1MH) for part_VK in _split(values_VK, together)]
        )

    def _variant_losses(
        self, values_VK: NDArray[np.float32], packed: PackedBatch, prefix_1MH: Tensor | None
    ) -> NDArray[np.float32]:
        """[v, R] in one forward pass, each layer computed once for variants that agree up to it."""
        plan = plan_sharing(values_VK, self._model.spans)
        value_VK, state_R = self._tensor(values_VK), self._tensor(packed.state_R)

        def program(entry_1MH: Tensor, run: RunLayer) -> Tensor:
            hidden_GMH = entry_1MH if prefix_1MH is None else prefix_1MH
            for index in range(self._first_masked, len(plan)):
                groups = plan[index]
                if groups.splits:
                    hidden_GMH = hidden_GMH[self._tensor(groups.parent_G)]
                with self._model.overlay.using(_of_groups(value_VK, groups)):
                    hidden_GMH = run(index, hidden_GMH)
            return hidden_GMH[:, state_R]

        hidden_GRH = self._decode(packed, program)
        groups = len(hidden_GRH)
        losses = self._model.head.losses(
            hidden_GRH.flatten(0, 1), self._tensor(packed.target_R).repeat(groups)
        )
        losses_GR: NDArray[np.float32] = losses.view(groups, -1).float().cpu().numpy()
        return losses_GR[plan[-1].group_V]

    def _derivative_sums(
        self, value_K: Tensor, directions_QK: NDArray[np.float32], packed: PackedBatch
    ) -> NDArray[np.float64]:
        """Sum over some sequences' targets of the token losses, then of their derivative along each
        direction, [1 + q]."""
        prefix_1MH = self._prefix_states(packed)
        together = max(1, self._max_tokens // packed.tokens - 1)
        sums = [
            self._query_sums(value_K, part_QK, packed, prefix_1MH)
            for part_QK in _split(directions_QK, together)
        ]
        return np.concatenate([sums[0][:1], *(part[1:] for part in sums)])

    def _query_sums(
        self, value_K: Tensor, directions_QK: NDArray[np.float32], packed: PackedBatch, prefix: Tensor | None
    ) -> NDArray[np.float64]:
        """As `_derivative_sums`, in one forward pass.

        A derivative is the tangent of the hidden state times the head's gradient, which all directions share.
        """
        state_R = self._tensor(packed.state_R)

        def hidden(value_K: Tensor) -> Tensor:
            def program(entry_1MH: Tensor, run: RunLayer) -> Tensor:
                states_1MH = entry_1MH if prefix is None else prefix
                with self._model.overlay.using(value_K[None], differentiated=True):
                    for index in range(self._first_masked, len(self._model.stack)):
                        states_1MH = run(index, states_1MH)
                return states_1MH[:, state_R]

            return self._decode(packed, program, tangents=len(directions_QK))[0]

        def pushed(direction_K: Tensor) -> Any:
            return jvp(hidden, (value_K,), (direction_K,))

        # The stubs of vmap know no axis None: the primal has no axis of directions.
        both = vmap(pushed, out_dims=(None, 0))(self._tensor(directions_QK))  # type: ignore[arg-type]
        hidden_RH, tangent_QRH = both
        loss_R, gradient_RH = self._model.head.gradients(hidden_RH, self._tensor(packed.target_R))
        products_QRH = tangent_QRH.to(gradient_RH.dtype) * gradient_RH
        sums_Q = products_QRH.sum(dim=(1, 2), dtype=torch.float64)
        sums_Q1: NDArray[np.float64] = torch.cat([loss_R.double().sum()[None], sums_Q]).cpu().numpy()
        return sums_Q1

    def _prefix_states(self, packed: PackedBatch) -> Tensor | None:
        """Hidden states [1, M, H] before the first masked layer, from the cache where it has them."""
        if self._first_masked == 0:
            return None
        if self._prefix_cache is None:
            return self._computed_prefix(packed)
        keys = [row_key(row, self._prefix_scope) for row in packed.rows()]
        found = [self._prefix_cache.get(key) for key in keys]
        missing = [row for row, states in enumerate(found) if states is None]
        for rows in self._prefix_cache.together(missing):
            begin = time.perf_counter()
            states_MH = _as_array(self._computed_prefix(packed.only(rows))[0])
            each_s = (time.perf_counter() - begin) / len(rows)
            cuts = np.cumsum(packed.length_B[rows])[:-1]
            for row, states_TH in zip(rows, np.split(states_MH, cuts), strict=True):
                self._prefix_cache.put(keys[row], states_TH, fill_s=each_s)
                found[row] = states_TH
        rows_MH = np.concatenate([states_TH for states_TH in found if states_TH is not None])
        return self._tensor(rows_MH).view(self._dtype)[None]

    def _computed_prefix(self, packed: PackedBatch) -> Tensor:
        """[1, M, H], computed; no value has a part in it."""
        reached: list[Tensor] = []

        def program(entry_1MH: Tensor, run: RunLayer) -> Tensor:
            hidden_1MH = entry_1MH
            with self._model.overlay.using(self._no_values):
                for index in range(self._first_masked):
                    hidden_1MH = run(index, hidden_1MH)
            reached.append(hidden_1MH)
            return hidden_1MH[:, :1]

        self._decode(packed, program)
        return reached[0]

    def _decode(self, packed: PackedBatch, program: Program, *, tangents: int = 0) -> Tensor:
        """What the program makes of the layers, after the model's final norm: no padding, no mask."""
        segments = Segments(packed.length_B, self._device, tangents=tangents)
        with self._model.stack.running(program, segments):
            output = self._model.decoder(
                inputs_embeds=self._embed(self._tensor(packed.ids_M)),
                position_ids=self._tensor(packed.position_M)[None],
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _embed(self, ids_M: Tensor) -> Tensor:
        """[1, M, H]: tokens looked up in the table as stored, then widened; the table is never converted."""
        used_MH = self._model.embedding_DH[ids_M].to(self._dtype)
        places_1M = torch.arange(len(ids_M), device=self._device)[None]
        embedded: Tensor = functional_call(self._model.embed, {"weight": used_MH}, (places_1M,))
        return embedded

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _split(rows: NDArray[np.float32], size: int) -> list[NDArray[np.float32]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _of_groups(value_VK: Tensor, groups: LayerGroups) -> Tensor:
    """The values of each group, [G, K]; no copy where every variant is a group."""
    if groups.count == len(value_VK):
        return value_VK
    return value_VK[torch.from_numpy(groups.first_G).to(value_VK.device)]


def _as_array(states: Tensor) -> NDArray[Any]:
    """The same bits; bfloat16 as the 16-bit integers that numpy has."""
    states = states.cpu()
    array: NDArray[Any] = (states.view(torch.int16) if states.dtype == torch.bfloat16 else states).numpy()
    return array


def _device(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"expected device cpu, cuda or cuda:<index>, got {name!r}")
    device = torch.device(name)
    found = torch.cuda.device_count() if kind == "cuda" else 1
    if (device.index or 0) >= found:
        raise OperatorError(f"expected a CUDA device for {name!r}, torch {torch.__version__} finds {found}")
    return device
