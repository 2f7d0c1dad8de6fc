"""Tests that every engine must pass.

Call `Conformance(engine=engine, tiny=tiny).check()`, or parametrize a pytest test with the rules. The
reference is unmodified transformers in float32 on the same weights. An engine with a coarser dtype passes its
own tolerance.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from permille.engines.interface import REVERSE_PASSES, Engine, GradientEngine
from permille.engines.sampling import TokenSampling
from permille.engines.variants import first_masked, layer_spans
from permille.errors import InputError
from permille.zo.estimators import Batch, SoftTargets
from tests.unit.engines.tiny import (
    VOCABULARY,
    Tiny,
    reference_gradient,
    reference_token_losses,
    rows_of,
    set_values,
    tiny_batch,
    variants,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """The rules for one engine on one package.

    Attributes:
        engine: the engine under test.
        tiny: the package of the engine, and its reference.
        loss_tolerance: bound on |loss - reference|, absolute. It also bounds the difference between two
            groupings of the same work.
        derivative_tolerance: bound on the error of a derivative, relative to the largest derivative.
    """

    engine: Engine
    tiny: Tiny
    loss_tolerance: float = 1e-5
    derivative_tolerance: float = 1e-4

    def check(self) -> None:
        """Check all rules of `RULES`."""
        for rule in RULES:
            rule(self)

    def token_losses_are_those_of_the_reference(self) -> None:
        batch = tiny_batch()
        for values_K in variants(self.tiny.package, 2):
            got = self.engine.token_losses(values_K, batch)
            assert got.dtype == np.float32
            assert got.shape == (batch.target_BT.sum(),)
            np.testing.assert_allclose(
                got, self._reference(values_K, batch), rtol=0, atol=self.loss_tolerance
            )

    def losses_are_means_over_targets(self) -> None:
        batch, values_VK = tiny_batch(), variants(self.tiny.package, 3)
        got = self.engine.losses(values_VK, batch)
        assert got.dtype == np.float32
        expected = [self._reference(values_K, batch).mean() for values_K in values_VK]
        np.testing.assert_allclose(got, expected, rtol=0, atol=self.loss_tolerance)
        assert len(set(got.tolist())) == 3  # the variants differ, so the engine uses the values

    def variants_together_are_variants_alone(self) -> None:
        batch, values_VK = tiny_batch(), variants(self.tiny.package, 5)
        together = self.engine.losses(values_VK, batch)
        alone = [self.engine.losses(values_K[None], batch)[0] for values_K in values_VK]
        np.testing.assert_allclose(together, alone, rtol=0, atol=self.loss_tolerance)

    def what_variants_agree_in_is_computed_once(self) -> None:
        """Count layer passes, of four variants that differ only in the last layer and of a gradient."""
        spans, rows = layer_spans(self.tiny.package), 3
        lowest, last = first_masked(spans), len(spans) - 1
        values_VK = variants(self.tiny.package, 4, scale=0.1)
        for span in (span for own in spans[:last] for span in own):
            values_VK[1:, span] = values_VK[0, span]
        # New tokens, for which the engine has no stored states.
        batches = [_moved(tiny_batch(), by) for by in (1, 2)]
        before = self.engine.layer_passes
        together = self.engine.losses(values_VK, batches[0])
        assert self.engine.layer_passes - before == rows * (last + 4)
        alone = [self.engine.losses(values_K[None], batches[0])[0] for values_K in values_VK]
        np.testing.assert_allclose(together, alone, rtol=0, atol=self.loss_tolerance)
        before = self.engine.layer_passes
        self._gradient_engine().gradient(values_VK[0], batches[1])
        above = REVERSE_PASSES * (len(spans) - lowest)
        assert self.engine.layer_passes - before == rows * (lowest + above)

    def repeated_calls_have_the_same_bits(self) -> None:
        batch, values_VK = tiny_batch(), variants(self.tiny.package, 3)
        first = self.engine.losses(values_VK, batch)
        self.engine.losses(values_VK[:1] + 1, batch)
        np.testing.assert_array_equal(self.engine.losses(values_VK, batch), first)

    def padding_changes_nothing(self) -> None:
        batch, values_K = tiny_batch(), self.tiny.package.values()
        wider = _padded(batch, columns=5, fill=VOCABULARY - 1)
        other = _padded(batch, columns=0, fill=3)
        got = self.engine.token_losses(values_K, batch)
        for padded in (wider, other):
            np.testing.assert_array_equal(self.engine.token_losses(values_K, padded), got)

    def sequences_together_are_sequences_alone(self) -> None:
        batch, values_K = tiny_batch(), self.tiny.package.values()
        alone = [self.engine.token_losses(values_K, rows_of(batch, [row])) for row in range(3)]
        together = self.engine.token_losses(values_K, batch)
        np.testing.assert_allclose(together, np.concatenate(alone), rtol=0, atol=self.loss_tolerance)

    def derivatives_are_those_of_reverse_mode(self) -> None:
        batch, values_K = tiny_batch(), variants(self.tiny.package, 2)[1]
        expected_K = self._gradient(values_K, batch)
        expected_loss = self.engine.losses(values_K[None], batch)[0]
        loss, got_K = self._gradient_engine().gradient(values_K, batch)
        assert abs(loss - expected_loss) <= self.loss_tolerance
        assert got_K.dtype == np.float32
        assert got_K.shape == (self.engine.k,)
        atol = self.derivative_tolerance * np.abs(expected_K).max()
        np.testing.assert_allclose(got_K, expected_K, rtol=0, atol=atol)

    def infinite_values_give_losses_that_are_not_finite(self) -> None:
        values_VK = variants(self.tiny.package, 2)
        values_VK[1] = np.nan
        got = self.engine.losses(values_VK, tiny_batch())
        assert np.isfinite(got[0])
        assert not np.isfinite(got[1])

    def infinite_values_give_a_gradient_that_is_not_finite(self) -> None:
        values_K = np.full_like(self.tiny.package.values(), np.nan)
        loss, gradient_K = self._gradient_engine().gradient(values_K, tiny_batch())
        assert not np.isfinite(loss)
        assert not np.isfinite(gradient_K).any()

    def greedy_text_is_that_of_the_reference(self) -> None:
        values_K, prompt = variants(self.tiny.package, 2, scale=0.1)[1], np.array([3, 1, 4, 1, 5])
        got = list(self.engine.generate(values_K, prompt, TokenSampling(max_new_tokens=8)))
        assert len(got) == 8
        set_values(self.tiny.package, self.tiny.reference, values_K)
        ids = torch.tensor([*prompt.tolist(), *got])
        logits = self.tiny.reference(ids[None]).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
        # Each chosen token must have the largest logit, within the tolerance.
        assert (chosen >= logits.max(dim=1).values - 10 * self.loss_tolerance).all()

    def sampling_depends_on_the_seed_alone(self) -> None:
        values_K, prompt = self.tiny.package.values(), np.array([3, 1, 4])

        def text(seed: int) -> list[int]:
            sampling = TokenSampling(max_new_tokens=12, temperature=1.5, top_p=0.95, seed=seed)
            return list(self.engine.generate(values_K, prompt, sampling))

        assert text(1) == text(1)
        assert text(1) != text(2)

    def text_ends_before_a_stop_token(self) -> None:
        values_K, prompt = self.tiny.package.values(), np.array([3, 1, 4])
        free = list(self.engine.generate(values_K, prompt, TokenSampling(max_new_tokens=6)))
        stop = free[-1]
        got = list(self.engine.generate(values_K, prompt, TokenSampling(max_new_tokens=6, stop_ids={stop})))
        assert got == free[: free.index(stop)]

    def soft_targets_are_those_of_the_reference(self) -> None:
        hard = tiny_batch()
        base_K, moved_K = variants(self.tiny.package, 2, scale=0.05)
        batch = replace(hard, soft=self._soft(base_K, hard))
        got = self.engine.token_losses(moved_K, batch)
        expected = self._divergences(moved_K, batch)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=self.loss_tolerance)
        assert expected.mean() > 0  # the reference has another distribution than the base
        # The loss is 0 if the model predicts the soft targets themselves.
        atol = self.loss_tolerance
        np.testing.assert_allclose(self.engine.token_losses(base_K, batch), 0, rtol=0, atol=atol)
        losses_V = self.engine.losses(np.stack([base_K, moved_K]), batch)
        np.testing.assert_allclose(losses_V, [0, expected.mean()], rtol=0, atol=atol)

    def soft_targets_have_the_derivatives_of_their_loss(self) -> None:
        hard = tiny_batch()
        base_K, moved_K = variants(self.tiny.package, 2, scale=0.05)
        batch = replace(hard, soft=self._soft(base_K, hard))
        loss, gradient_K = self._gradient_engine().gradient(moved_K, batch)
        assert abs(loss - self._divergences(moved_K, batch).mean()) <= self.loss_tolerance
        # The loss changes most along its gradient, so the difference is well above rounding errors.
        z_K = gradient_K / np.linalg.norm(gradient_K)
        step = np.float32(0.01)
        up, down = (self._divergences(moved_K + sign * step * z_K, batch).mean() for sign in (1, -1))
        np.testing.assert_allclose(
            (up - down) / (2 * step), gradient_K @ z_K, rtol=0.02 + self.derivative_tolerance
        )

    def a_distribution_on_one_token_is_that_token(self) -> None:
        hard, values_K = tiny_batch(), self.tiny.package.values()
        ids_R = hard.input_ids_BT[hard.target_BT]
        ids_RN = np.stack([ids_R, (ids_R + 1) % VOCABULARY], axis=1)
        one_RN = np.tile(np.array([1, 0], np.float32), (len(ids_R), 1))
        batch = replace(hard, soft=SoftTargets(ids_RN=ids_RN, probability_RN=one_RN))
        got = self.engine.token_losses(values_K, batch)
        expected = self.engine.token_losses(values_K, hard)
        np.testing.assert_allclose(got, expected, rtol=0, atol=10 * self.loss_tolerance + 2e-5)

    def wrong_soft_targets_are_refused(self) -> None:
        hard, values_K = tiny_batch(), self.tiny.package.values()
        ids_RN = np.tile(np.array([1, 2]), (int(hard.target_BT.sum()), 1))
        half_RN = np.full(ids_RN.shape, 0.5, np.float32)
        wrong: tuple[tuple[NDArray[np.int64], Any], ...] = (
            (ids_RN[1:], half_RN[1:]),
            (ids_RN + VOCABULARY, half_RN),
            (ids_RN * 0, half_RN),
            (ids_RN, half_RN[:, :1]),
            (ids_RN, half_RN.astype(np.float64)),
            (ids_RN, half_RN * 2),
            (ids_RN, -half_RN),
            (ids_RN, half_RN * np.float32(np.nan)),
        )
        for ids, probabilities in wrong:
            batch = replace(hard, soft=SoftTargets(ids_RN=ids, probability_RN=probabilities))
            with pytest.raises(InputError):
                self.engine.losses(values_K[None], batch)

    def wrong_input_is_refused(self) -> None:
        batch, values_K = tiny_batch(), self.tiny.package.values()
        calls: tuple[Callable[[], object], ...] = (
            lambda: self.engine.losses(values_K, batch),
            lambda: self.engine.losses(values_K[None, :-1], batch),
            lambda: self.engine.losses(values_K[None].astype(np.float64), batch),
            lambda: self.engine.losses(values_K[None][:0], batch),
            lambda: self.engine.losses(values_K[None], _with_token(batch, VOCABULARY)),
        )
        for call in calls:
            with pytest.raises(InputError, match="expected"):
                call()

    def wrong_input_of_derivatives_and_text_is_refused(self) -> None:
        batch, values_K = tiny_batch(), self.tiny.package.values()
        for call in (
            lambda: self._gradient_engine().gradient(values_K[:-1], batch),
            lambda: self._gradient_engine().gradient(values_K, _with_token(batch, VOCABULARY)),
            lambda: self.engine.generate(values_K, np.array([VOCABULARY]), TokenSampling(max_new_tokens=1)),
            lambda: self.engine.generate(values_K, np.array([1]), TokenSampling(max_new_tokens=0)),
        ):
            with pytest.raises(InputError, match=r"expected|must be"):
                call()

    def _soft(self, values_K: NDArray[np.float32], batch: Batch) -> SoftTargets:
        """Return the reference's five most probable tokens at each target."""
        q_RD = self._probabilities(values_K, batch)
        ids_RN = np.argsort(-q_RD, axis=1)[:, :5]
        probability_RN: NDArray[np.float32] = np.take_along_axis(q_RD, ids_RN, axis=1).astype(np.float32)
        return SoftTargets(ids_RN=ids_RN, probability_RN=probability_RN)

    def _divergences(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float64]:
        """Return the losses of soft targets, computed by definition, float64 [R]."""
        assert batch.soft is not None
        q_RD, p_RN = self._probabilities(values_K, batch), batch.soft.probability_RN.astype(np.float64)
        q_RN = np.take_along_axis(q_RD, batch.soft.ids_RN, axis=1)
        rest_R, rest_q_R = 1 - p_RN.sum(axis=1), 1 - q_RN.sum(axis=1)
        found_R: NDArray[np.float64] = (p_RN * np.log(p_RN / q_RN)).sum(axis=1)
        found_R += rest_R * np.log(rest_R / rest_q_R)
        return found_R

    def _probabilities(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float64]:
        """Return the reference's predictions at each target, float64 [R, D]."""
        set_values(self.tiny.package, self.tiny.reference, values_K)
        found = []
        for ids_T, target_T in zip(batch.input_ids_BT, batch.target_BT, strict=True):
            place_R = np.flatnonzero(target_T)
            if len(place_R):
                ids = torch.from_numpy(ids_T[: place_R[-1] + 1])
                with torch.no_grad():
                    logits_TD = self.tiny.reference(ids[None]).logits[0].double()
                found.append(torch.softmax(logits_TD[place_R - 1], dim=1).numpy())
        return np.concatenate(found)

    def _gradient_engine(self) -> GradientEngine:
        return cast("GradientEngine", self.engine)

    def _reference(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        set_values(self.tiny.package, self.tiny.reference, values_K)
        losses: NDArray[np.float32] = reference_token_losses(self.tiny.reference, batch).numpy()
        return losses

    def _gradient(self, values_K: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        set_values(self.tiny.package, self.tiny.reference, values_K)
        gradient_K: NDArray[np.float32] = reference_gradient(
            self.tiny.package, self.tiny.reference, batch, values_K
        )
        return gradient_K


# Rules that training with losses only needs.
LOSS_RULES: tuple[Callable[[Conformance], None], ...] = (
    Conformance.token_losses_are_those_of_the_reference,
    Conformance.losses_are_means_over_targets,
    Conformance.variants_together_are_variants_alone,
    Conformance.repeated_calls_have_the_same_bits,
    Conformance.padding_changes_nothing,
    Conformance.sequences_together_are_sequences_alone,
    Conformance.infinite_values_give_losses_that_are_not_finite,
    Conformance.wrong_input_is_refused,
)
RULES = (
    *LOSS_RULES,
    Conformance.derivatives_are_those_of_reverse_mode,
    Conformance.soft_targets_are_those_of_the_reference,
    Conformance.soft_targets_have_the_derivatives_of_their_loss,
    Conformance.a_distribution_on_one_token_is_that_token,
    Conformance.wrong_soft_targets_are_refused,
    Conformance.infinite_values_give_a_gradient_that_is_not_finite,
    Conformance.greedy_text_is_that_of_the_reference,
    Conformance.sampling_depends_on_the_seed_alone,
    Conformance.text_ends_before_a_stop_token,
    Conformance.wrong_input_of_derivatives_and_text_is_refused,
)

# Rules for engines that compute the shared layers of variants once.
SHARING_RULES = (*RULES, Conformance.what_variants_agree_in_is_computed_once)


def _padded(batch: Batch, *, columns: int, fill: int) -> Batch:
    """Return the batch with `columns` more columns of padding. All padding has the token `fill`."""
    widths = ((0, 0), (0, columns))
    attention_BT = np.pad(batch.attention_BT, widths)
    return Batch(
        input_ids_BT=np.where(attention_BT, np.pad(batch.input_ids_BT, widths), fill),
        attention_BT=attention_BT,
        target_BT=np.pad(batch.target_BT, widths),
    )


def _moved(batch: Batch, by: int) -> Batch:
    """Return the batch with other tokens at the same places."""
    return replace(batch, input_ids_BT=(batch.input_ids_BT + by) % VOCABULARY)


def _with_token(batch: Batch, token: int) -> Batch:
    ids_BT = batch.input_ids_BT.copy()
    ids_BT[0, 1] = token
    return replace(batch, input_ids_BT=ids_BT)
