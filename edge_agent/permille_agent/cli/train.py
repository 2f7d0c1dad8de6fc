"""The command `train`."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from permille.arguments import named_path
from permille.choices import Method, choice_of
from permille.errors import InputError
from permille.exits import ExitCode
from permille.plain_console import PlainConsole
from permille_agent.cli.console import (
    COMPUTING,
    START,
    TEXT_FILES,
    EngineOption,
    JsonOption,
    home_of,
    show,
)
from permille_agent.state.choices import read_consent, read_references
from permille_agent.state.home import Home
from permille_agent.state.home import as_json as json_of
from permille_agent.state.lock import hold_lock
from permille_agent.training.engines import AUTO, EngineChoice

if TYPE_CHECKING:
    from permille_agent.link.report import Delivery
    from permille_agent.training.options import TrainOptions
    from permille_agent.training.outcome import RunResult
    from permille_agent.training.progress import LiveProgress


SHOWN_EXAMPLES = 5
METHOD = "How to train"  # a panel of options in `--help`


def register(app: typer.Typer) -> None:
    """Add the command `train` to `app`."""
    app.command(rich_help_panel=START)(train)


def train(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=named_path, help=f"Files ({TEXT_FILES}) or folders. Default: those of `data add`."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Minutes to train and judge. Default: the release's number of steps, else 30 minutes."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Number of steps instead of minutes. The result is then repeatable bit for bit."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for batches and directions.", rich_help_panel=METHOD)] = 0,
    method: Annotated[
        Method | None,
        typer.Option(
            help="How to compute steps. Default: zeroth-order with --estimator, --engine executorch or a "
            "shared log, else the release's method, else gradient.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    estimator: Annotated[
        str | None,
        typer.Option(
            help="Estimator of zeroth order: one-sided, spsa, split or forward. Default: spsa with --engine "
            "executorch, else one-sided.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    first_layer: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Train only the masked weights of this decoder layer and the layers above it. Default: the "
            "release's first layer, else all layers.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(
            help="Directions per zeroth-order step. Default: 16 for one-sided, 8 for spsa and forward, 15 "
            "for split.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of text per step. Default: 4 with the gradient, else 2.", rich_help_panel=METHOD
        ),
    ] = None,
    row_tokens: Annotated[
        int,
        typer.Option(
            help="Longest row, in tokens, up to the model's context. Longer rows learn from more context and "
            "take more memory.",
            rich_help_panel=METHOD,
        ),
    ] = 128,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="Model to begin from. active: the model in use if it fits the package, else the "
            "adopted round, else the base. round or base: begin there. Zeroth order begins at the base.",
        ),
    ] = "active",
    learn: Annotated[
        str,
        typer.Option(
            help="Turns of a conversation to learn: assistant (the answers), user (your own voice) or all. "
            "This has no effect on other text."
        ),
    ] = "assistant",
    rate_scale: Annotated[
        float,
        typer.Option(
            help="Factor for the learning rate. Try 0.5 if training diverges or forgets too much.",
            rich_help_panel=METHOD,
        ),
    ] = 1.0,
    keep_general: Annotated[
        float,
        typer.Option(help="Largest allowed rise of the loss on general text, in nats per token."),
    ] = 0.1,
    memory: Annotated[
        int | None,
        typer.Option(
            help="Largest number of tokens of your text that the model keeps in its memory, at least 16. "
            "0 makes none. Default: 1024. It has fewer if it would take more than half of the model's "
            "positions, or 256 MiB. Runs with --engine torch or executorch, and runs that share their log or "
            "state, have none."
        ),
    ] = None,
    share_log: Annotated[
        bool | None,
        typer.Option(
            "--share-log/--no-share-log",
            help="Send the log of seeds and scalars with the report. The log is personal data, and the run "
            "uses zeroth order. Works for finished runs, too. Default: the setting of `share-log`.",
        ),
    ] = None,
    share_state: Annotated[
        bool | None,
        typer.Option(
            "--share-state/--no-share-state",
            help="Send the trained values with the report if no log is sent. They are personal data. Works "
            "for finished runs, too. Default: the setting of `share-state`.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the engine. Default: all cores.", rich_help_panel=COMPUTING),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=COMPUTING)] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(help="Precision: float32, or bfloat16 with --engine torch.", rich_help_panel=COMPUTING),
    ] = "float32",
    engine: EngineOption = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Personalise the installed model on your text.

    [bold]Examples[/bold]

      permille-agent train ~/notes --minutes 20

      permille-agent train mail.jsonl --steps 500 --seed 1 --json

      permille-agent train mail.jsonl --steps 500 --seed 1 --share-log

      permille-agent train ~/notes --method zeroth-order --from base

      permille-agent train conversations.json --learn user

    Your text is divided into three parts. The first part trains, the second selects the best state, and the
    third judges it. The new model is adopted only if it is surely better on the third part. Otherwise the
    model in use stays, and the exit code is 7. A text of 700 to 5,400 tokens is judged part by part.
    From less text, only a memory is made, which is not tested. The trained change is weakened until the loss
    on general text rises by at most --keep-general. It is also weakened until the model answers the general
    questions that the base answers correctly. Stop the training with Ctrl-C. The same command resumes it.
    """
    from permille_agent.state.models import active_model, training_of_release
    from permille_agent.text.documents import Learn
    from permille_agent.training.options import Start, options_for
    from permille_agent.training.progress import LiveProgress

    home = home_of(context)
    consent = read_consent(home)
    # Only the option --share-log conflicts with --method gradient. The setting `share-log on` is overridden.
    if share_log and method is Method.GRADIENT:
        raise InputError(
            "A gradient run has no log of seeds and scalars. Share its state with --share-state, or leave "
            "--method out."
        )
    options = options_for(
        training_of_release(home),
        engine=engine,
        share_log=consent.share_log if share_log is None else share_log,
        method=method,
        estimator=estimator,
        steps=steps,
        minutes=minutes,
        first_layer=first_layer,
        queries=queries,
        rows=rows,
        row_tokens=row_tokens,
        seed=seed,
        # Check these options here instead of in typer, because `--help` would have to import their types.
        start=choice_of(Start, start, "a start"),
        learn=choice_of(Learn, learn, "a choice of turns to learn"),
        rate_scale=rate_scale,
        keep_general=keep_general,
        memory=memory,
    )
    chosen = EngineChoice(name=engine, threads=threads, device=device, dtype=dtype)
    # Progress goes to standard error, so that standard output has only the result.
    live = LiveProgress(home, None if as_json else PlainConsole(stderr=True))
    result, log = _train(home, paths or (), options, chosen, live, share_log, share_state)
    active = active_model(home)
    # The request may be a run that finished earlier, and another model may be in use since then.
    in_use = active is not None and active.run == result.run
    document = {**json_of(result), "log_delivery": log.value}
    show(document, as_json=as_json, render=lambda console: _render(console, result, log, in_use))
    raise typer.Exit(int(_EXIT_CODES[result.outcome.value]))


def _train(
    home: "Home",
    paths: Sequence[Path],
    options: "TrainOptions",
    engine: EngineChoice,
    live: "LiveProgress",
    share_log: bool | None,
    share_state: bool | None,
) -> tuple["RunResult", "Delivery"]:
    """Train and queue the report. Also share the log or state of an earlier run if an option asks for it.

    If `share_log` or `share_state` is None, the setting of that name decides.
    """
    from permille.schemas.runs import LogForm
    from permille_agent.link import report
    from permille_agent.training.options import RunContext
    from permille_agent.training.train import run_training

    data_paths = [path.expanduser() for path in paths] or list(read_references(home))
    if not data_paths:
        raise InputError(
            "No text to train on. Name files or folders, or add some with `permille-agent data add`."
        )
    # Read the consent before the training. If the user withdraws it meanwhile, the count of withdrawals
    # differs, and neither log nor state is sent.
    consent = read_consent(home)
    with hold_lock(home, "train"), _stopped_by_signals() as stop, live as progress:
        context = RunContext(
            share_log=consent.share_log if share_log is None else share_log,
            share_state=consent.share_state if share_state is None else share_state,
            withdrawals=consent.withdrawals,
            stop=stop,
            progress=progress,
            engine_of=engine,
        )
        result = run_training(home, data_paths, options, context)
        # Queue the report first, because `share_run` adds a log only to a report that is queued.
        report.collect_reports(home)
        # Only an earlier run needs this. For a new run, `collect_reports` has already queued the log.
        if result.known and (share_log or share_state):
            form = LogForm.LOG if share_log else LogForm.STATE
            report.share_run(home, result.run, form, withdrawals=consent.withdrawals)
        return result, report.log_delivery(home, result.run_id)


_EXIT_CODES = {
    "adopted": ExitCode.OK,
    "kept_base": ExitCode.KEPT_BASE,
    "refused_data": ExitCode.INPUT_REFUSED,
    "interrupted": ExitCode.INTERRUPTED,
    "failed": ExitCode.OPERATOR,
}


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets. A second signal has its usual effect."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _render(console: Console, result: "RunResult", log: "Delivery", in_use: bool) -> None:
    from permille_agent.training.evaluation import strength_words
    from permille_agent.training.outcome import outcome_words
    from permille_agent.training.parts import general_words

    if result.known:
        adopted = result.outcome.value == "adopted"
        where = f", and its model is {'' if in_use else 'not '}in use" if adopted else ""
        console.print(
            f"This text was trained on before with these options{where}. Nothing was computed. "
            "Change the text or an option to train again. The earlier result:",
            highlight=False,
        )
    colour = "green" if result.outcome.value == "adopted" else "yellow"
    words = outcome_words(result.outcome, result.decision)
    console.print(f"[{colour}]{words}[/{colour}]: {escape(result.message)}", highlight=False)
    if log.value == "queued":
        console.print("Your log or trained values wait to be sent. `permille-agent report` sends them now.")
    if result.data is not None:
        console.print(f"your text: {result.data.summary()}", markup=False, highlight=False)
    for example in result.bad_row_examples[:SHOWN_EXAMPLES]:
        # File names may contain brackets, which rich would read as markup.
        console.print(f"  {example}", markup=False, highlight=False)
    decision, metrics = result.decision, result.metrics
    if decision is None or metrics is None:
        return
    table = Table(show_header=False, box=None)
    if decision.against_base is not None:
        lost = f"{decision.loss_base:.4f} of the base -> {decision.loss_personal:.4f}"
        table.add_row("held-out loss", lost)
        table.add_row("against the base", str(decision.against_base))
    if decision.against_active is not None:
        table.add_row("against the active model", str(decision.against_active))
    if decision.rows:
        table.add_row("measured on", decision.rows)
    if decision.general is not None or decision.against_base is not None or decision.parts is not None:
        table.add_row("general loss", general_words(decision.general, decision.parts))
    if decision.answers:
        table.add_row("asked", "; ".join(answer.prompt for answer in decision.answers))
    if decision.parts is not None:
        table.add_row("memory", decision.parts.words())
    if decision.general is not None or decision.answers:
        table.add_row("strength", strength_words(decision.strength, decision.fault))
    if decision.steps:
        table.add_row("steps", f"{decision.step} of {decision.steps} used")
    table.add_row("time", f"{metrics.seconds:.0f} s")
    table.add_row("peak memory", f"{metrics.peak_rss_bytes / 2**20:.0f} MiB")
    if metrics.personal_bytes:
        table.add_row("personal part", f"{metrics.personal_bytes} bytes")
    console.print(table)
