"""One training run in a fresh process, for its time and its memory: the child of `first_order`.

Prints one JSON line: the evaluations with the clock's seconds, and the peaks of the process. What the
method does not need is not imported: libraries are most of the memory of a small model's training.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from permille.errors import InputError
from permille_agent.text.rows import TrainingBatches
from permille_agent.training.evaluation import mean_loss
from permille_lab.benchmarks.engine_steps import opened
from permille_lab.benchmarks.loss_page import LEARNED, OURS
from permille_lab.benchmarks.machine import AnonymousPeak, resident
from permille_lab.benchmarks.model_packages import sources_from_environment
from permille_lab.benchmarks.trajectories import BATCH_ROWS, descend, train_agent
from permille_lab.benchmarks.user_text import UserText, user_text

# On the NF4 base that all share.
METHODS = (OURS[0], LEARNED, "LoRA", "sparse values")
MICRO_ROWS = 2


def _lora(user: UserText, *, learning_rate: float, steps: int, every: int) -> dict[str, Any]:
    from permille_lab.benchmarks.lora import LoraStep
    from permille_lab.benchmarks.packed_training import packed_model

    model, _ = packed_model(user.package)
    batches = TrainingBatches(user.prepared.train, batch_rows=BATCH_ROWS, seed=user.seed)
    trainer = LoraStep(model, batches(0), micro_rows=MICRO_ROWS, learning_rate=learning_rate)
    points = descend(
        lambda number: trainer.step(batches(number)),
        partial(_loss, trainer.model, user),
        steps=steps,
        every=every,
    )
    return {"points": points}


def _sparse(user: UserText, *, learning_rate: float, steps: int, every: int) -> dict[str, Any]:
    """AdamW on the package's own sparse values, from exact gradients."""
    import torch

    from permille_lab.benchmarks.lora import accumulate
    from permille_lab.benchmarks.packed_training import bind_values, packed_model

    model, values_K = packed_model(user.package)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    values_K.requires_grad_(True)
    optimizer = torch.optim.AdamW([values_K], lr=learning_rate, weight_decay=0.0)
    batches = TrainingBatches(user.prepared.train, batch_rows=BATCH_ROWS, seed=user.seed)

    def step(number: int) -> None:
        batch = batches(number)
        accumulate(model, batch, MICRO_ROWS, before=partial(bind_values, model, values_K))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    points = descend(step, partial(_loss, model, user), steps=steps, every=every)
    return {"points": points}


def _loss(model: Any, user: UserText) -> float:
    from permille_lab.benchmarks.dense import rows_loss

    model.eval()
    loss = rows_loss(model, user.prepared.select)
    model.train()
    return loss


def _check_base(user: UserText, threads: int, found: dict[str, Any]) -> None:
    """What is trained first-order must begin where our engine begins: the same base, the same rows."""
    engine = opened(user.package, "torch", threads=threads)
    if engine is None:
        raise InputError("expected the torch engine, found none")
    base = mean_loss(engine, user.package.values(), user.prepared.select)
    if abs(base - found["points"][0]["loss"]) > 1e-3:
        raise InputError(f"expected a base loss of {base}, got {found['points'][0]['loss']}")


def main() -> None:
    """Train in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speaker", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.method not in OURS:
        import torch

        torch.set_num_threads(arguments.threads)
    user = user_text(
        sources_from_environment(),
        arguments.model,
        arguments.speaker,
        arguments.seed,
        arguments.packages,
        arguments.home,
        learned="learned" in arguments.method,
    )
    with AnonymousPeak() as anonymous:
        if arguments.method in OURS:
            ours = train_agent(user, steps=arguments.steps, threads=arguments.threads, options={})
            found = ours.result
        else:
            train = _lora if arguments.method == "LoRA" else _sparse
            found = train(
                user,
                learning_rate=arguments.learning_rate,
                steps=arguments.steps,
                every=arguments.every,
            )
    peaks = {"peak_bytes": resident()["VmHWM"], "anonymous_peak_bytes": anonymous.bytes}
    if arguments.method in OURS:
        found["points"] = ours.points_of_log()
    else:
        _check_base(user, arguments.threads, found)
    print(json.dumps(found | peaks))


if __name__ == "__main__":
    main()
