"""HTML page about a run: samples, the course of training, and the decision.

The page is one file without scripts and links. It is personal data, like the run's folder that contains it.
Samples are generated once and kept in the folder.

A model that has forgotten general knowledge may still have a low loss on the user's text. So the page shows
the loss on general text first. For a chat model, it also shows answers to a few questions before and after
training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from permille.errors import OperatorError, PackageError, PermilleError
from permille.files import write_atomic
from permille_agent.link.extension import agent_extensions
from permille_agent.link.report import Delivery, read_report
from permille_agent.local.compare import (
    continue_prompt,
    first_token_seconds,
    first_token_words,
    test_prompts,
)
from permille_agent.local.model import LocalModel, Sampling, Variant
from permille_agent.state.home import Home, telling_disk
from permille_agent.state.models import Active, active_model, read_manifest
from permille_agent.training.answers import Sample
from permille_agent.training.decision import Decision
from permille_agent.training.engines import OpenEngine
from permille_agent.training.evaluation import strength_words
from permille_agent.training.memory import Part
from permille_agent.training.outcome import RunOutcome, TextSource, outcome_words
from permille_agent.training.run import BegunRun, LearnedText, RunFolder, list_runs, named_run

PAGE = "show.html"
TOKENS = 48  # length of a sample, because longer samples take minutes on a slow device
TEMPERATURE = 0.7
SHOWN_EXAMPLES = 5  # of skipped rows
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 630.0, 20.0, 190.0  # edges of the curve in the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Contents of a run's `samples.json`. `memory` is the text of the memory.

    `first_token_s` is the result of `first_token_seconds` on the first prompt.
    """

    samples: tuple[Sample, ...]
    memory: str = ""
    first_token_s: Mapping[Variant, float] = field(default_factory=dict)


def show_run(home: Home, name: str | None, engine_of: OpenEngine) -> Path:
    """Write the page of a run, and return its path. The default is the newest finished run.

    The caller needs no lock, because a finished run does not change, and files are replaced atomically.

    Raises:
        InputError: the name fits no run or several.
        OperatorError: the run is not finished, or the page cannot be written.
    """
    folder = _run(home, name)
    end = folder.require("outcome", RunOutcome)
    decision = folder.load("decision", Decision)
    by_parts = folder.load("learned", LearnedText) is not None
    gain = _gain(decision)
    written, no_samples = None, ""
    # An untested memory has no gain. Its text is shown, too.
    if gain is not None or (decision is not None and decision.adopted):
        try:
            written = folder.once("samples", Written, lambda: _write_samples(home, folder, engine_of))
        except (OperatorError, PackageError) as exc:
            no_samples = str(exc)
    metrics, active = end.metrics, active_model(home)
    source = folder.load("data", TextSource) or TextSource()
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("show.html.jinja").read_text(encoding="utf-8")
    )
    page = template.render(
        headline=outcome_words(metrics.outcome, decision),
        message=end.message,
        in_use=active is not None and active.run == folder.name,
        gain=gain,
        by_parts=by_parts,
        adopted=decision is not None and decision.adopted,
        eighths=decision.strength if decision else 0,
        part=decision.part if decision else None,
        with_memory=decision.parts.general if decision and decision.parts else None,
        general=decision.general if decision else None,
        answers=decision.answers if decision else (),
        memory=_memory(folder, decision),
        parts=_losses_of_parts(decision),
        first_token=first_token_words(written.first_token_s) if written else "",
        strength=strength_words(decision.strength, decision.fault) if decision else "",
        curve=None if decision is None or by_parts else _curve(folder, decision),
        written=written,
        no_samples=no_samples,
        text=end.data.summary(),
        tokens=_parts(metrics.train_tokens, metrics.select_tokens, metrics.test_tokens),
        rows=decision.rows if decision else "",
        work=f"{metrics.steps} steps{_of_what(home, folder)}, {metrics.seconds:.0f} s, "
        f"{metrics.peak_rss_bytes >> 20} MiB at most",
        learn=folder.require("run", BegunRun).definition.options.learn.value,
        left=_left_the_device(home, folder),
        sent={one.name: one.sent(home) for one in agent_extensions()},
        run=folder.name,
        skipped=source.bad_rows[:SHOWN_EXAMPLES],
    )
    path = folder.path / PAGE
    with telling_disk():  # a training that ends now may delete this folder
        write_atomic(path, page.encode(), mode=0o600)
    return path


def _memory(folder: RunFolder, decision: Decision | None) -> str:
    if decision is None or decision.parts is None:
        return ""
    words = decision.parts.words()
    gone = decision.adopted and decision.part.has_memory and not folder.memory.exists()
    return words + "; the memory was erased together with its text" * gone


def _losses_of_parts(decision: Decision | None) -> list[tuple[str, str, bool]]:
    """Return the name of each part, its loss, and whether it was chosen. Empty if nothing was measured."""
    if decision is None or decision.parts is None:
        return []
    return [
        ("base model" if part is Part.BASE else part.words, f"{loss:.4f}", part is decision.parts.chosen)
        for part, loss in decision.parts.losses.items()
        if loss is not None
    ]


def _of_what(home: Home, folder: RunFolder) -> str:
    """Describe the trained weights. Return an empty string if the package is gone."""
    try:
        return f" of {read_manifest(home, folder.require('run', BegunRun).definition.package).trains}"
    except PermilleError:
        return ""


def _run(home: Home, name: str | None) -> RunFolder:
    runs = list_runs(home)
    if name is not None:
        return named_run(home, name)
    ended = [run for run in runs if run.load("outcome", RunOutcome) is not None]
    if not ended:
        raise OperatorError("No run has ended yet. Run `permille-agent train`.")
    return ended[-1]


def _gain(decision: Decision | None) -> Mapping[str, Any] | None:
    """Return the numbers of the judgement for the page.

    `percent` is the growth of the probability of the next token, as a geometric mean. The
    losses of a short text are those of states that were trained on its earlier parts, not of the final state.
    """
    if decision is None or decision.loss_base is None or decision.loss_personal is None:
        return None
    base, personal = decision.loss_base, decision.loss_personal
    return {
        "loss_base": base,
        "loss": personal,
        # Bound the exponent, because `exp` of the loss of a broken model would overflow.
        "percent": 100.0 * math.expm1(min(50.0, base - personal)),
        "perplexity_base": math.exp(min(50.0, base)),
        "perplexity": math.exp(min(50.0, personal)),
        "sure": decision.against_base,
        "beside": decision.against_active,
        "beside_name": "the model in use before",
    }


def _curve(folder: RunFolder, decision: Decision) -> Mapping[str, Any] | None:
    """Return the coordinates of the loss curve in a picture of 640 x 220."""
    evaluations, kept = folder.evaluations(decision.descent), decision.step
    found = [(evaluation.step, evaluation.loss) for evaluation in evaluations if evaluation.loss is not None]
    if len(found) < 2:
        return None
    losses = [loss for _, loss in found]
    low, high, steps = min(losses), max(losses), found[-1][0]

    def place(step: int, loss: float) -> tuple[float, float]:
        share = (high - loss) / (high - low) if high > low else 0.5
        return round(_LEFT + (_RIGHT - _LEFT) * step / max(1, steps), 1), round(
            _TOP + (_BOTTOM - _TOP) * share, 1
        )

    chosen = next(((step, loss) for step, loss in found if step == kept), found[0])
    kept_x, kept_y = place(*chosen)
    return {
        "points": " ".join(f"{x},{y}" for x, y in (place(step, loss) for step, loss in found)),
        "base_y": place(*found[0])[1],
        "kept_x": kept_x,
        "kept_y": kept_y,
        "low": low,
        "high": high,
        "steps": steps,
    }


def _write_samples(home: Home, folder: RunFolder, engine_of: OpenEngine) -> Written:
    package = folder.require("run", BegunRun).definition.package
    with LocalModel(home, engine_of, Active(package=package, run=folder.name)) as model:
        sampling = Sampling(max_new_tokens=TOKENS, temperature=TEMPERATURE, seed=0)
        prompts = test_prompts(folder, model) or ["The"]
        seconds = first_token_seconds(model, prompts[0])
        samples = tuple(continue_prompt(model, prompt, sampling) for prompt in prompts)
        return Written(samples=samples, memory=model.memory_text(), first_token_s=seconds)


def _parts(train: int, select: int, test: int) -> str:
    if not train:
        return ""
    if not select:
        return f"{train} tokens to train. {test} of them judged the model before it trained on them"
    return f"{train} tokens to train, {select} to select the state, {test} to judge it"


def _left_the_device(home: Home, folder: RunFolder) -> str:
    report = read_report(home, folder.run_id)
    if report is None or report.metrics_delivery is Delivery.NONE:
        return "nothing"
    if report.metrics_delivery in (Delivery.QUEUED, Delivery.FULL):
        numbers = "nothing yet. A report waits to be sent. It has numbers and none of your text"
    else:
        numbers = "a report, which has numbers and none of your text"
    match report.log_delivery:
        case Delivery.NONE:
            return numbers
        case Delivery.QUEUED | Delivery.FULL:
            return f"{numbers}. The training log, which you share, waits to be sent"
        case Delivery.SENT:
            return (
                f"{numbers}. Also the training log, which you share. Log and package together give your model"
            )
    return f"{numbers}. State of the training log: {report.log_delivery.value}"
