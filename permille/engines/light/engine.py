"""The light engine runs a package in float32, with numpy and our own kernels, without torch.

    engine = LightEngine(package, threads=4)
    losses_V = engine.losses(values_VK, batch)

numpy's BLAS computes the products. Weights are dequantized a tile at a time, once for all variants that go
through a layer together. The tokens of all sequences are joined end to end, without padding. Embedding and
head are read from the mapped file.

Token losses agree with those of the torch engine up to rounding (1e-5). The same call gives the same bits if
the build and the number of threads are the same.

With `int8`, losses are computed with linear-layer inputs rounded to 8 bits. A step of a 1.1B model then takes
two thirds of the time on a processor with AVX2 (`docs/results/engine.md`). Sparse values, attention, norms
and head stay float32. Gradients and generated text do not use 8-bit inputs.

# Legend: V variants, G groups of variants, K masked weights, B sequences, T tokens of a sequence, M tokens of
all joined sequences, H hidden size, R target tokens.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from permille.engines.inputs import check_batch, check_key_values, check_prompt, check_values
from permille.engines.interface import REVERSE_PASSES, EngineInfo
from permille.engines.key_values import KeyValues
from permille.engines.light.blas import Blas
from permille.engines.light.decoding import TextPass
from permille.engines.light.linear import Tools
from permille.engines.light.model import LightModel, load_model
from permille.engines.light.passes import LossPass, Workspace, finish, run_layer
from permille.engines.light.reverse import ReversePass
from permille.engines.light.sequences import (
    JoinedSequences,
    LowerLayerStates,
    join_sequences,
)
from permille.engines.light.threads import Threads
from permille.engines.sampling import TokenSampling, generate_tokens, new_tokens
from permille.engines.variants import Groups, run_variants
from permille.errors import InputError
from permille.native.library import cpu_path
from permille.package.reader import Package
from permille.version import __version__
from permille.zo.estimators import Batch, SoftTargets

Array = NDArray[np.float32]

# The largest number of tokens of all variants in one forward pass. It bounds the memory for activations. With
# 1024 tokens of a 1.1B model, the peak memory is the size of the package plus about 120 MB, libraries
# included. With 2048 tokens, the peak is the package plus about 160 MB, and a pass is a few percent faster.
DEFAULT_MAX_TOKENS = 1024
# Matrix products of fewer tokens than this are slow. If there are many variants, the engine runs fewer
# variants at a time, so that a product has this many tokens.
_FEW_TOKENS = 256
# Memory for hidden states below the first masked layer. It suffices for 128 sequences of 256 tokens of a 1.1B
# model. It is used only if the lowest layer is not masked.
DEFAULT_KEPT_BYTES = 256 << 20


class LightEngine:
    """See `permille.engines.interface` for what each method promises."""

    def __init__(
        self,
        package: Package,
        *,
        threads: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        kept_bytes: int = DEFAULT_KEPT_BYTES,
        int8: bool = False,
    ) -> None:
        """Map the package. Nothing is dequantized yet.

        Args:
            package: the package.
            threads: the number of threads. None takes one for each processor that the process may use.
            max_tokens: the largest number of tokens of all variants in one forward pass. Larger calls run in
                parts.
            kept_bytes: memory for hidden states below the first masked layer, kept between calls. It is not
                used if the lowest layer is masked.
            int8: round the inputs of linear layers to 8 bits when losses are computed.

        Raises:
            InputError: the engine does not support the model, an argument is out of range, or `int8` is set
                and the package is not int4 with a group size that is a multiple of 32.
            PackageError: the package breaks its format.
        """
        if max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {max_tokens}.")
        if threads is not None and threads < 1:
            raise InputError(f"threads must be at least 1, not {threads}.")
        # ADR 20: 8-bit inputs are for losses alone. Gradients and text always use float32 inputs.
        self._exact = Tools(blas=Blas(), threads=Threads(threads))
        self._tools = replace(self._exact, int8=int8)
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._workspace = Workspace()
        self._model: LightModel = load_model(package, self._tools)
        if int8:
            # Check each layer now, so that an unsuitable package is refused before the first loss.
            for linear in (linear for layer in self._model.layers for linear in layer.linears):
                linear.check_int8()
        self._reverse = ReversePass(self._exact, self._model, self._workspace)
        self._lower_states = LowerLayerStates(kept_bytes)
        self._layer_passes = 0
        # What rows and prompts follow, the limits beyond it, and tokens that replace BOS. `after` sets them.
        self._after: KeyValues | None = None
        self._limits = self._model.limits
        self._bos, self._joint = (np.empty(0, np.int64) for _ in range(2))

    @property
    def k(self) -> int:
        """Number of trained values of the package: masked weights, or an adapter's numbers."""
        return self._model.limits.k

    def info(self) -> EngineInfo:
        """Return name, versions, compute dtype, threads and device."""
        return EngineInfo(
            name="light-int8" if self._tools.int8 else "light",
            version=f"permille {__version__}, numpy {np.__version__}, "
            f"{self._tools.blas.name}, kernels {cpu_path()}",
            compute_dtype="int8-activations" if self._tools.int8 else "float32",
            threads=self._tools.threads.count,
            device="cpu",
        )

    @property
    def layer_passes(self) -> int:
        """Count passes of one sequence through one decoder layer so far, forward and backward."""
        return self._layer_passes

    def losses(self, values_VK: Array, batch: Batch) -> Array:
        """Return the mean loss over the batch's targets for each variant, float32 [V]."""
        check_values(values_VK, self._limits)
        token_losses_VR = self._token_losses(values_VK, self._checked(batch))
        # NaN and infinite losses are valid results, so numpy must not warn of them.
        with np.errstate(invalid="ignore", over="ignore"):
            losses_V: Array = token_losses_VR.mean(axis=1, dtype=np.float64).astype(np.float32)
        return losses_V

    def token_losses(self, values_K: Array, batch: Batch) -> Array:
        """Return the loss of each target token, float32 [targets], in row-major order of the batch."""
        check_values(values_K[None], self._limits)
        losses_R: Array = self._token_losses(values_K[None], self._checked(batch))[0]
        return losses_R

    def top_tokens(self, values_K: Array, batch: Batch, number: int) -> SoftTargets:
        """Return the most probable tokens at each target of a batch, and their probabilities.

        Args:
            values_K: float32 [K].
            batch: the batch.
            number: how many tokens to return for each target.
        """
        check_values(values_K[None], self._limits)
        batch = self._checked(batch)
        found = []
        with self._lock, np.errstate(all="ignore"):
            for joined in join_sequences(batch, min(self._max_tokens, _FEW_TOKENS), self._first):
                ((_, states_1RH),) = self._states(np.ascontiguousarray(values_K)[None], joined)
                for state_H in states_1RH[0]:
                    logit_D = self._model.head.logits(state_H[None])[0].astype(np.float64)
                    # Sort stably, so that of equally likely tokens the lowest id comes first.
                    id_S = np.argsort(-logit_D, kind="stable")[:number]
                    total = np.logaddexp.reduce(logit_D)
                    found.append((id_S, np.exp(logit_D[id_S] - total)))
        ids_RS, probability_RS = (np.stack(column) for column in zip(*found, strict=True))
        return SoftTargets(ids_RN=ids_RS, probability_RN=probability_RS.astype(np.float32))

    def gradient(self, values_K: Array, batch: Batch) -> tuple[float, Array]:
        """Return the mean loss and its gradient. This is about three times the work of a loss, for any k."""
        if self._after is not None:
            raise InputError("The engine computes no gradients of rows that follow stored keys and values.")
        check_values(values_K[None], self._limits)
        values_K = np.ascontiguousarray(values_K)
        batch = self._checked(batch)
        targets, tokens = int(batch.target_BT.sum()), int(batch.attention_BT.sum())
        loss_sum, gradient_K = 0.0, np.zeros(self.k, np.float32)
        with self._lock, np.errstate(all="ignore"):
            for joined in join_sequences(batch, min(self._max_tokens, self._reverse.part_tokens(tokens))):
                x_1MH = self._residual(1, joined, self._exact)
                loss, part_K = self._reverse.gradient(joined, values_K, x_1MH)
                above = len(self._model.layers) - self._model.first_masked
                self._layer_passes += REVERSE_PASSES * above * len(joined.sequences)
                loss_sum += loss
                gradient_K += part_K
                del part_K, x_1MH  # else they would stay in memory during the next part
            self._workspace.clear()  # the optimizer needs memory next
        return loss_sum / targets, gradient_K / np.float32(targets)

    def generate(
        self,
        values_K: Array,
        prompt_ids: NDArray[np.int64],
        sampling: TokenSampling,
        keep: Callable[[KeyValues], None] | None = None,
    ) -> Iterator[int]:
        """Yield new token ids one by one, with a key-value cache."""
        check_values(values_K[None], self._limits)
        check_prompt(prompt_ids, self._limits)
        room = new_tokens(sampling, len(prompt_ids), self._limits.positions)
        # Copy the arrays, because the generator runs later, when the caller may have changed them.
        run = TextPass(self._exact, self._model, values_K.copy(), len(prompt_ids) + room, self._after)

        def next_logits(ids: NDArray[np.int64]) -> Array:
            # The lock is taken for each token, so a consumer that pauses does not block other callers.
            with self._lock:
                return run.next_logits(ids)

        ids = generate_tokens(next_logits, self._joined(prompt_ids[None])[0], sampling, room)
        return ids if keep is None else _kept(ids, run, keep)

    def read(self, values_K: Array, ids: NDArray[np.int64]) -> KeyValues:
        """Return the keys and values of a text."""
        check_values(values_K[None], self._limits)
        check_prompt(ids, self._limits)
        run = TextPass(self._exact, self._model, values_K, len(ids), self._after)
        with self._lock:
            run.next_logits(self._joined(ids[None])[0])
        return run.key_values()

    def after(self, known: KeyValues, bos: Sequence[int] = ()) -> "LightEngine":
        """Return an engine for texts that begin with the tokens of `known`."""
        model, shape, place = self._model, self._model.architecture, len(known) - len(bos)
        check_key_values(known, model.limits, (len(model.layers), shape.kv_heads, shape.head))
        # The new engine shares everything but the beginning: weights, work memory and the lock.
        engine = copy.copy(self)
        engine._after, engine._limits = known.first(place), model.limits.after(place)
        engine._bos, engine._joint = np.array(bos, np.int64), known.id_S[place:]
        return engine

    @property
    def _first(self) -> int:
        """Return the position of the first token of a row."""
        return 0 if self._after is None else len(self._after)

    def _checked(self, batch: Batch) -> Batch:
        batch = check_batch(batch, self._limits, soft=True)
        return replace(batch, input_ids_BT=self._joined(batch.input_ids_BT))

    def _joined(self, ids_BT: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a copy of rows, in which the end of `after`'s tokens replaces BOS."""
        ids_BT, bos = ids_BT.copy(), len(self._bos)
        # A shorter row cannot begin with BOS.
        if ids_BT.shape[1] >= bos:
            ids_BT[(ids_BT[:, :bos] == self._bos).all(axis=1), :bos] = self._joint
        return ids_BT

    def _token_losses(self, values_VK: Array, batch: Batch) -> Array:
        """Return the losses [V, R] of a checked batch, computed in parts of at most `max_tokens`."""
        rows = max(self._max_tokens // len(values_VK), min(_FEW_TOKENS, self._max_tokens))
        with self._lock, np.errstate(all="ignore"):
            return np.concatenate(
                [self._part_losses(values_VK, joined) for joined in join_sequences(batch, rows, self._first)],
                axis=1,
            )

    def _part_losses(self, values_VK: Array, joined: JoinedSequences) -> Array:
        """Return the losses [V, R], in as many forward passes as the bound on tokens requires."""
        found_VR = np.empty((len(values_VK), len(joined.target_R)), np.float32)
        for groups, states_GRH in self._states(values_VK, joined):
            losses_N = self._model.head.losses(
                states_GRH.reshape(-1, states_GRH.shape[2]),
                # Each group has one hidden state for each target, so repeat the targets for each group.
                np.tile(joined.target_R, len(groups)),
                None if joined.soft is None else joined.soft.repeated(len(groups)),
            )
            for variants, losses_R in zip(groups, losses_N.reshape(len(groups), -1), strict=True):
                found_VR[variants] = losses_R
        return found_VR

    def _states(self, values_VK: Array, joined: JoinedSequences) -> Iterator[tuple[Groups, Array]]:
        """Yield groups of variants with the same values, each with the states before the targets, [G, R, H].

        The results of a variant do not depend on how many variants go through a layer together.
        """
        room = min(max(1, self._max_tokens // len(joined.id_M)), len(values_VK))
        x_GMH = self._residual(room, joined, self._tools)
        run = _VariantsPass(self._tools, self._model, self._workspace, joined, x_GMH, self._after)
        for groups, found_GMH in run_variants(run, values_VK, self._model.spans, x_GMH[:1], room=room):
            yield groups, finish(run, self._model, self._before_targets(found_GMH, joined))
        self._layer_passes += run.layer_passes

    def _residual(self, states: int, joined: JoinedSequences, tools: Tools) -> Array:
        """Return work memory for hidden states, [states, M, H].

        The first state is set to the input of the first masked layer.
        """
        x_GMH = self._workspace.take("residual", (states, len(joined.id_M), self._model.hidden))
        if self._model.first_masked == 0:
            # All variants start from one state, because they agree below the first masked layer.
            x_GMH[0] = self._model.embed(joined.id_M, joined.position_M)
            return x_GMH
        for index, part in enumerate(joined.sequences):

            def compute(index: int = index) -> Array:
                return self._below_mask(joined.only(index), tools)

            x_GMH[0, part] = self._lower_states.of(joined.id_M[part], tools.int8, self._after, compute)
        return x_GMH

    def _below_mask(self, joined: JoinedSequences, tools: Tools) -> Array:
        """Return the hidden states [M, H] after the layers below all trained values."""
        x_1MH = self._model.embed(joined.id_M, joined.position_M)[None]
        run = LossPass(tools, self._model.architecture, self._workspace, joined, self._after)
        # Layers below the mask have no trained values, so run one group with an empty vector of values.
        run.set_values(np.empty((1, 0), np.float32))
        for layer in self._model.layers[: self._model.first_masked]:
            run_layer(run, layer, x_1MH)
            self._layer_passes += 1
        states_MH: Array = x_1MH[0]
        return states_MH

    def _before_targets(self, x_GMH: Array, joined: JoinedSequences) -> Array:
        """Return the hidden states [G, R, H] of the tokens before the targets, in the buffer "normed"."""
        # With mode="raise", `take` would buffer the output. Our indices are valid, so "clip" changes none.
        shape = (len(x_GMH), len(joined.state_R), x_GMH.shape[2])
        return np.take(x_GMH, joined.state_R, axis=1, out=self._workspace.take("normed", shape), mode="clip")


def _kept(ids: Iterator[int], run: TextPass, keep: Callable[[KeyValues], None]) -> Iterator[int]:
    """Yield the new tokens. Then, or when the caller stops, hand out the keys and values."""
    try:
        yield from ids
    finally:
        if run.length:  # a prompt may be interrupted while it is read
            keep(run.key_values())


class _VariantsPass(LossPass):
    """A `DecoderPass` (see `permille.engines.variants`) in work memory with room for several groups."""

    def __init__(
        self,
        tools: Tools,
        model: LightModel,
        workspace: Workspace,
        joined: JoinedSequences,
        room_GMH: Array,
        after: KeyValues | None,
    ) -> None:
        super().__init__(tools, model.architecture, workspace, joined, after)
        self._model, self._room_GMH = model, room_GMH
        self.layer_passes = 0

    def keep(self, state: Array) -> Array:
        return state.copy()

    def fork(self, state: Array, source_G: list[int], values_GK: Array) -> Array:
        # Fill the last place first. The source of a place is at the same or an earlier place, so it is not
        # overwritten before it is copied.
        for place in range(len(source_G) - 1, -1, -1):
            self._room_GMH[place] = state[source_G[place]]
        self.set_values(values_GK)
        return self._room_GMH[: len(source_G)]

    def run_layer(self, number: int, state: Array) -> Array:
        run_layer(self, self._model.layers[number], state)
        self.layer_passes += len(state) * len(self._joined.sequences)
        return state
