"""permille on one page: from a model to a personal model, whose training any machine can repeat exactly.

    python -m examples.one_page                # the example model
    python -m examples.one_page model.gguf     # a model of yours

A number in brackets is an equation of "Zeroth-Order Fine-Tuning of LLMs with Extreme Sparsity". The paper
measures gradients on C4. Here, `examples/corpus.jsonl.gz` stands in for it. Unlike `permille-agent train`,
this page does not search for a step size, and does not test the result before it is used.

Shapes: K = masked weights, Q = directions of a step, N = rows of text, T = tokens of a row.
"""

import gzip
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import permille
from permille.choices import EstimatorKind
from permille.corpora.sequences import token_sequences
from permille.engines.factory import open_engine
from permille.models.loading import FileTokenizer
from permille.zo.estimators import Batch, directions_of
from permille.zo.header import LogHeader, Schedule
from permille.zo.lattice import perturbed_pairs, state_digest, step_unit_exponent_for, values
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepRecord
from permille.zo.replay import replay
from permille.zo.steps import apply_record, rounded_step

EXAMPLES = Path(__file__).resolve().parent
STEPS, Q, ROWS, TOKENS, UNSEEN = 20, 4, 8, 48, 16


def one_page(source: str | Path, folder: Path) -> tuple[str, str]:
    """Return two digests: of the state that was trained, and of the state that was replayed from the log."""
    # On a server: model, gradients, mask, 4 bits, package (figure 4, steps 1 to 5).
    model = permille.load_model(source)
    with gzip.open(EXAMPLES / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        public = [json.loads(line)["text"] for line in lines]
    # (8) F = mean of (grad log p)^2       (3) m = argmax |m * grad f|^2, one weight in a thousand
    mask = permille.sensitivity_mask(model, public, density=0.001, sequences=8, length=128)
    # (11) w_sparse = w * m, w_dense = w * (1 - m)       (13) w_dense is rounded to 4 bits
    package = permille.build_package(model, mask, folder, scheme="nf4")

    # On a device: zeroth-order steps on the user's text (figure 4, step 6).
    engine, w_K = open_engine(package), package.values()  # w_sparse before the first step
    notes = (EXAMPLES / "gardener" / "notes.txt").read_text(encoding="utf-8")
    tokenizer = FileTokenizer(model.folder)
    rows_NT = token_sequences(tokenizer, [notes], len(tokenizer.encode(notes)) // TOKENS, TOKENS, seed=0)
    unseen, seen_NT = batch_of(rows_NT[:UNSEEN]), rows_NT[UNSEEN:]
    epsilon, eta = 0.5 / package.k**0.5, (Q / package.k) ** 0.5
    unit = step_unit_exponent_for(eta, 1.0, Q)  # the state is w_sparse = w + 2^unit s, with integers s
    header = LogHeader(
        package_digest=package.digest, mask_digest=package.mask_digest, counts=package.counts, seed=7,
        estimator=EstimatorKind.SPSA, queries=Q, epsilon=epsilon, learning_rate=eta,
        schedule=Schedule.LINEAR, total_steps=STEPS, step_unit_exponent=unit,
    )  # fmt: skip
    s_K, records = np.zeros(package.k, np.int64), list[StepRecord]()
    for step in range(STEPS):
        batch = batch_of(seen_NT[np.arange(step * ROWS, (step + 1) * ROWS) % len(seen_NT)])
        z_QK = directions_of(header, step)  # z_k,t: signs from a seed and the step, not N(0, I)
        pairs_VK = perturbed_pairs(w_K, s_K, unit, z_QK, epsilon)  # w + eps z, w - eps z, for each z
        f_V = engine.losses(pairs_VK, batch)  # f(w + eps z), f(w - eps z)
        g_Q = (f_V[0::2].astype(np.float64) - f_V[1::2]) / (2 * epsilon)  # (1) without the factor z
        # c = rint(-eta g / (Q rms(g) 2^unit)). Not in the paper: rms(g), and whole numbers.
        records.append(rounded_step(float(f_V.mean()), g_Q, header, step, normalised=True))
        apply_record(s_K, records[-1], header)  # (12) w_sparse <- w_sparse - eta g z, as s <- s + c z
    before, after = engine.losses(np.stack([w_K, values(w_K, s_K, unit)]), unseen).tolist()
    log = encode_canonical(header, records)  # a seed, and Q integers a step

    # On any machine: the log gives the same state, bit by bit.
    received = decode_canonical(log, max_bytes=1 << 20, max_steps=STEPS)
    again_K = replay(received.header, received.coefficients_TQ)  # s = sum of c z over all steps
    trained, replayed = (
        state_digest(state_K, mask_digest=package.mask_digest, step_unit_exponent=unit)
        for state_K in (s_K, again_K)
    )
    print(f"{package.k} weights in a package of {package.size_bytes} bytes, a log of {len(log)} bytes")
    print(f"loss on unseen text: {before:.4f} -> {after:.4f}")
    print(f"trained state: {trained}\nreplayed:      {replayed}")
    return trained, replayed


def batch_of(rows_NT: NDArray[np.int64]) -> Batch:
    """Return a batch that predicts each token of the rows from the tokens before it."""
    target_NT = np.ones(rows_NT.shape, bool)
    target_NT[:, 0] = False
    return Batch(input_ids_BT=rows_NT, attention_BT=np.ones(rows_NT.shape, bool), target_BT=target_NT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        one_page(sys.argv[1] if sys.argv[1:] else EXAMPLES / "model", Path(work))
