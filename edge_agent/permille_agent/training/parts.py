"""Choice of the parts of a personal model: the state, the memory, or both.

- The select split chooses the model with the lowest loss. If this is the base, nothing is judged.
- A short text has no select split. There, the rule is fixed: both if there is a state, else the memory. On
  nearly all texts that were measured, both had the lowest loss (docs/results/prompt-or-training.md).
- Beside a memory, a state has a lower strength than alone (`strength_beside_memory`).
- With the memory on, the base's right answers to general questions must stay right. If they do not, the
  next best model is taken, such as the memory alone. The bound on the loss on general text holds for the
  state alone, because a request can leave the memory off. The loss with the memory on is shown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.training.strength import EIGHTHS, strength_beside_memory
from permille_agent.text.tokens import TokenizedDocument, package_tokenizer
from permille_agent.training.answers import compare_answers
from permille_agent.training.evaluation import GeneralLoss, known_base
from permille_agent.training.memory import (
    Part,
    following,
    make_memory,
    memory_share,
    memory_tokens,
    store_memory,
)
from permille_agent.training.run import Run, finite_or_none

Model = tuple[Engine, NDArray[np.float32]]
"""An engine, perhaps one that follows a memory, and the values of the masked weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Contents of `parts.json`: the chosen parts of a model, and what was measured for the choice.

    Attributes:
        tokens: positions of the memory.
        losses: losses on the select split, or on the tested parts of a short text, in nats per token. None
            replaces a loss that is not finite.
        fault: what the best model with a memory would do to an answer, such as `lose the answer to "What
            ...?"`. "" if none.
        general: loss on general text with the memory on. None if the chosen model has no memory, or the
            package has no reference text.
        general_base: loss of the base on the same text.
        strength: strength of the state beside the memory, in eighths. 0 if the chosen model has not both.
        state_digest: digest of the state at this strength. None if the chosen model has not both.
        by_losses: whether the losses decided. Of a short text, the model keeps all that spoils no answer.
    """

    chosen: Part
    tokens: int
    losses: Mapping[Part, float | None]
    fault: str = ""
    general: float | None = None
    general_base: float | None = None
    strength: int = 0
    state_digest: str | None = None
    by_losses: bool = True

    def words(self) -> str:
        """Describe the choice and what it was made from, in nats per token."""
        finite = [f"{part.value} {loss:.4f}" for part, loss in self.losses.items() if loss is not None]
        words = "nothing" if self.chosen is Part.BASE else self.chosen.words
        how = "chosen by the losses" if self.by_losses else "as for any short text; the losses were"
        words += f", {how}: {', '.join(finite)}" if finite else ", untested"
        if self.fault:
            words += f"; {'a better one' if self.chosen.has_memory else 'a memory'} would {self.fault}"
        if self.chosen.has_memory:
            words += f"; the memory has {self.tokens} positions"
        if self.strength:
            words += f", and {self.strength}/{EIGHTHS} of what was trained are kept beside it"
        return words


def general_words(off: GeneralLoss | None, parts: Parts | None) -> str:
    """Describe the loss on general text with the memory off and on, or say why it was not measured.

    Args:
        off: losses of the base and of the state alone.
        parts: choice among state and memory. None if the run made no memory.
    """
    words = "not measured, because the package has no reference text"
    if off is not None:
        words = f"{off}{'' if parts is None else ', with the state alone'}"
    elif parts is not None and not parts.chosen.has_state:
        words = "that of the base with the memory off, because the model has no state"
    if parts is not None and parts.general is not None:
        on = GeneralLoss(loss_base=parts.general_base, loss=parts.general)
        # Earlier runs did not keep the loss of the base.
        words += f"; {parts.general:.4f}" if on.rise is None else f"; {on}"
        words += ", with the memory"
    return words


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledState:
    """The trained state at a strength.

    Attributes:
        eighths: the strength.
        values_K: values of the masked weights, float32 [K].
        judges: values that each part of the test text judges. A long text has one part.
        digest: digest of the state. None is the base.
    """

    eighths: int
    values_K: NDArray[np.float32]
    judges: Sequence[NDArray[np.float32]]
    digest: str | None


class Candidates:
    """The models among which a run chooses: `parts`, the richest last. Memories have `tokens` positions."""

    def __init__(
        self, run: Run, strength: int = 0, state_at: Callable[[int], ScaledState] | None = None
    ) -> None:
        """Make no model yet.

        Args:
            run: the run.
            strength: strength of the state alone.
            state_at: returns the state at a strength. None without a state.
        """
        self._run = run
        prepared, parts = run.prepared, max(1, len(run.prepared.stages))
        base = ScaledState(eighths=0, values_K=run.w_base_K, judges=[run.w_base_K] * parts, digest=None)
        self._states = {Part.BASE: base, Part.MEMORY: base}
        if state_at is not None:
            self._states[Part.STATE] = state_at(strength)
            share = memory_share(prepared.read, prepared.separator, run.options.memory)
            self._states[Part.BOTH] = state_at(strength_beside_memory(strength, share))
        self._memories: dict[tuple[Part, int], bytes] = {}
        self.parts = (Part.MEMORY,) if state_at is None else (Part.STATE, Part.MEMORY, Part.BOTH)
        self.tokens = len(memory_tokens(prepared.read, prepared.separator, run.options.memory))

    def state(self, part: Part) -> ScaledState:
        """Return the state of a model. A model without a state has the base's."""
        return self._states[part]

    def judged(self, part: Part) -> list[Model]:
        """Return the models that the parts of the test text judge. A long text has only one part."""
        reads = [stage.read for stage in self._run.prepared.stages] or [self._run.prepared.read]
        judges = self._states[part].judges
        return [self._model(part, values_K, read) for values_K, read in zip(judges, reads, strict=True)]

    def whole(self, part: Part) -> Model:
        """Return the model of the whole training text, which is used if it is adopted."""
        return self._model(part, self._states[part].values_K, self._run.prepared.read)

    def memory(self, part: Part) -> bytes:
        """Return the memory of the model `whole(part)`."""
        return self._memory(part, self._states[part].values_K, self._run.prepared.read)

    def _model(self, part: Part, values_K: NDArray[np.float32], read: tuple[TokenizedDocument, ...]) -> Model:
        engine = self._run.engine
        if part.has_memory:
            memory = self._memory(part, values_K, read)
            engine = following(engine, self._run.package, self._states[part].digest, memory, read[0].bos)
        return engine, values_K

    def _memory(
        self, part: Part, values_K: NDArray[np.float32], read: tuple[TokenizedDocument, ...]
    ) -> bytes:
        if (part, id(read)) not in self._memories:
            if not self._memories:
                self._run.progress.phase("reading the text into a memory")
            # The digest of a state that only judges a part of a short text is never compared.
            digest = self._states[part].digest
            self._memories[part, id(read)] = make_memory(self._run, values_K, digest, read)
        return self._memories[part, id(read)]


def choose_parts(run: Run, candidates: Candidates, loss_of: Callable[[Part], float]) -> Parts:
    """Choose the parts of the model durably, and store its memory.

    Args:
        run: the run.
        candidates: the models.
        loss_of: measures the loss of a model, on the select split or on the tested parts of a short text.
    """
    return run.folder.once("parts", Parts, lambda: _choose(run, candidates, loss_of))


def _choose(run: Run, candidates: Candidates, loss_of: Callable[[Part], float]) -> Parts:
    found = {part: loss_of(part) for part in (Part.BASE, *candidates.parts)}
    # The last candidate is the richest one. The rule of a short text takes it.
    order, by_losses = list(reversed(candidates.parts)), bool(run.prepared.select)
    if by_losses:
        order = sorted(found, key=lambda part: found[part] if math.isfinite(found[part]) else math.inf)
    chosen, fault, general, general_base = Part.BASE, "", None, None
    for part in order:
        found_fault = _fault(run, candidates.whole(part), told=bool(fault)) if part.has_memory else ""
        if not found_fault:
            chosen = part
            break
        fault = fault or found_fault
    if chosen.has_memory:
        if run.reference is not None:
            general = finite_or_none(run.reference.loss(*candidates.whole(chosen)))
            with closing(package_tokenizer(run.package)) as tokenizer:
                general_base = known_base(run, tokenizer).loss
        # Store the memory before the choice, so that no choice refers to a missing file.
        store_memory(run.folder, candidates.memory(chosen))
    both = candidates.state(Part.BOTH) if chosen is Part.BOTH else None
    return Parts(
        chosen=chosen,
        strength=0 if both is None else both.eighths,
        state_digest=None if both is None else both.digest,
        tokens=candidates.tokens,
        losses={part: finite_or_none(loss) for part, loss in found.items()},
        fault=fault,
        general=general,
        general_base=general_base,
        by_losses=by_losses,
    )


def _fault(run: Run, model: Model, *, told: bool) -> str:
    """Return what a model does to an answer of the base, or "" if it keeps all of them.

    With `told`, the phase is not named again.
    """
    with closing(package_tokenizer(run.package)) as tokenizer:
        base = known_base(run, tokenizer)
        if not told:
            run.progress.phase("asking general questions, with the memory")
        return compare_answers(*model, tokenizer, base.answers)[1]
