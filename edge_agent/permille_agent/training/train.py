"""`run_training`: one personalisation on this device, from paths to an adopted state, as `train` and the
daemon ask for it.

The thin shell around `trainer.py` and `judge.py`: opens package, engine and data, finds the run that the same
request began before, and makes the end durable. The caller holds the writers' lock.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from permille.engines.interface import Engine
from permille.errors import InputError, OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille_agent.state.activation import Active, activate, active_model, referenced_runs
from permille_agent.state.home import Home
from permille_agent.state.releases import InstalledRelease, installed_release
from permille_agent.text.documents import Document
from permille_agent.text.preparation import Prepared, prepare
from permille_agent.text.reading import DataReport, read_documents
from permille_agent.text.rows import TrainingBatches
from permille_agent.text.tokens import TextTokenizer
from permille_agent.training.decision import judge
from permille_agent.training.engines import EngineChoice
from permille_agent.training.interruption import InterruptibleEngine, RunInterrupted
from permille_agent.training.metrics import RunFacts, run_metrics
from permille_agent.training.options import TrainOptions
from permille_agent.training.outcome import RunResult, log_facts, result_of
from permille_agent.training.personal import model_values, store_state
from permille_agent.training.progress import RunProgress, SilentProgress
from permille_agent.training.run import Json, RunFolder, open_run, prune_runs
from permille_agent.training.run_clock import RunClock
from permille_agent.training.setup import Setup, training_exponents
from permille_agent.training.step_size import SearchFailed
from permille_agent.training.steps import Chosen, make_plan, train_attempts
from permille_agent.training.stopping import FAILED

OpenEngine = Callable[[Package], Engine]

"""Folder in a run's folder: hidden states of its text, for as long as a process trains."""


def run_training(
    home: Home,
    *,
    data_paths: Sequence[Path],
    steps: int | None,
    minutes: float | None,
    seed: int,
    share_log: bool,
    stop_event: threading.Event | None = None,
    progress: RunProgress | None = None,
    options: TrainOptions | None = None,
    engine_of: OpenEngine | None = None,
) -> RunResult:
    """Personalise the installed package on the text in `data_paths`; adopt the result where it is surely
    better.

    Started again with the same arguments after a kill, it goes on and ends with the same bits.

    Args:
        home: the home folder; the caller holds its lock.
        data_paths: files and folders.
        steps: how many steps, or None.
        minutes: how long, or None; exactly one of the two.
        seed: of the run.
        share_log: put the log of the chosen state beside the outcome, to be uploaded with the report.
        stop_event: once set, the run stops within one call of the engine, resumable.
        progress: told what happens.
        options: further choices; `steps`, `minutes` and `seed` are then those in it.
        engine_of: opens an engine on a package; None: the one that fits. A run that goes on keeps its engine;
            an active model of another package is opened with what fits it.

    Raises:
        InputError: paths or options that cannot be used.
        OperatorError: no package is installed.
        PackageError: the package or a state is not what it claims to be.
    """
    options = options or TrainOptions(seed=seed, steps=steps, minutes=minutes)
    progress = progress or SilentProgress()
    release = installed_release(home)
    if release is None:
        raise OperatorError("expected an installed package, found none: run `permille-agent pull`")
    package = Package.open(BlobFolder(home.blobs), release.manifest_digest)
    options = _fitting(options, package)
    progress.phase("reading the text")
    documents, report = read_documents(data_paths)
    tokenizer = package_tokenizer(package)
    try:
        prepared = prepare(
            documents, tokenizer, seed=options.seed, row_tokens=options.row_tokens, report=report
        )
    except InputError as exc:
        return _refused(home, release, package, options, documents, report, str(exc))
    run = _run(home, package, options, prepared.digest, data_paths, report)
    if (ended := run.load("outcome")) is not None:
        _activate_again(home, run, package)
        return result_of(run, ended, known=True)
    progress.phase("loading the model")
    engine_of = engine_of or EngineChoice()
    engine = _engine_of_run(run, engine_of)(package)
    _keep_engine(run, engine)
    if stop_event is not None:
        engine = InterruptibleEngine(engine, stop_event)
    job = _Job(home, release, package, options, prepared, report, run, engine, share_log)
    # The active model may be of another family, which the engine of this run need not know.
    return job.run_to_end(progress, engine_of)


def package_tokenizer(package: Package) -> TextTokenizer:
    """The tokenizer in a package."""
    names = package.manifest.files()
    return TextTokenizer(lambda name: package.file(name) if name in names else None)


@dataclass(frozen=True, slots=True)
class _Job:
    """One run that has begun."""

    home: Home
    release: InstalledRelease
    package: Package
    options: TrainOptions
    prepared: Prepared
    report: DataReport
    run: RunFolder
    engine: Engine
    share_log: bool

    def run_to_end(self, progress: RunProgress, engine_of: OpenEngine) -> RunResult:
        """All phases; those with a durable result are not computed again."""
        clock = RunClock(self.run)
        setup = self._setup()
        try:
            plan = make_plan(setup, self.run, progress, clock)
            chosen = train_attempts(setup, self.run, plan, progress, clock)
            progress.phase("judging on held-out text")
            incumbent = self._incumbent()
            decision = judge(setup, self.run, chosen, incumbent, lambda: self._open(incumbent, engine_of))
        except RunInterrupted as exc:
            clock.store()
            return RunResult(
                run=self.run.name,
                run_id=self.run.run_id,
                outcome=Outcome.INTERRUPTED,
                message=str(exc),
                details={},
            )
        except SearchFailed as exc:
            return self._end(setup, clock, Outcome.FAILED, str(exc), {}, {}, None)
        outcome = Outcome.KEPT_BASE
        if decision["adopted"]:
            outcome = Outcome.ADOPTED
            store_state(self.run, chosen.s_K)
            expected = Active(**decision["incumbent"])
            activate(self.home, Active(package=self.package.digest, run=self.run.name), expected=expected)
        elif chosen.step == 0 and chosen.stopped in FAILED:
            outcome = Outcome.FAILED
        return self._end(setup, clock, outcome, decision["reason"], plan, decision, chosen)

    def _setup(self) -> Setup:
        return Setup(
            engine=self.engine,
            package_digest=self.package.digest,
            mask_digest=self.package.mask_digest,
            counts=self.package.counts,
            w_base_K=self.package.values(),
            prepared=self.prepared,
            options=self.options,
            batches=TrainingBatches(
                self.prepared.train, batch_rows=self.options.batch_rows, seed=self.options.seed
            ),
            exponents=training_exponents(self.package, self.options),
            decoder_layers=int(self.package.config["num_hidden_layers"]),
        )

    def _incumbent(self) -> Active:
        """What is active now, and was when the decision was made."""
        active = active_model(self.home)
        return Active(package=self.package.digest) if active is None else active

    def _open(
        self, active: Active, engine_of: OpenEngine
    ) -> tuple[Engine, NDArray[np.float32], TextTokenizer, int]:
        same = active.package == self.package.digest
        package = self.package if same else Package.open(BlobFolder(self.home.blobs), active.package)
        values_K = model_values(self.home, active, package)
        engine = self.engine if same else _whatever_fits(engine_of)(package)
        return engine, values_K, package_tokenizer(package), _fitting(self.options, package).row_tokens

    def _end(
        self,
        setup: Setup,
        clock: RunClock,
        outcome: Outcome,
        message: str,
        plan: Json,
        decision: Json,
        chosen: Chosen | None,
    ) -> RunResult:
        facts = RunFacts(
            release=self.release,
            options=self.options,
            k=self.package.k,
            outcome=outcome,
            seconds=clock.seconds(),
            prepared=self.prepared,
            plan=plan,
            decision=decision,
            engine=self.engine.info(),
            **({} if chosen is None else log_facts(self.run, setup, decision, chosen, self.share_log)),
        )
        end = {
            "message": message,
            "metrics": run_metrics(facts).model_dump(mode="json"),
            "data": self.report.as_json(),
            "engine": dict(self.engine.info()),
        }
        self.run.store("outcome", end)
        prune_runs(self.home, keep={self.run.name, *referenced_runs(self.home)})
        return result_of(self.run, end, known=False)


def _fitting(options: TrainOptions, package: Package) -> TrainOptions:
    """The options with rows that fit the package's model."""
    return options.within(int(package.config.get("max_position_embeddings") or options.row_tokens))


def _run(
    home: Home,
    package: Package,
    options: TrainOptions,
    data_digest: str,
    data_paths: Sequence[Path],
    report: DataReport,
) -> RunFolder:
    definition = {
        "format": "permille-run-1",
        "package": package.digest,
        "data": data_digest,
        "options": options.definition(),
    }
    run = open_run(home, definition)
    places = {"paths": [str(path.absolute()) for path in data_paths], "bad_rows": report.examples}
    run.once("data", lambda: places)
    return run


def _engine_of_run(run: RunFolder, engine_of: OpenEngine) -> OpenEngine:
    begun = _engine_name(run)
    if begun is None or not isinstance(engine_of, EngineChoice):
        return engine_of
    return engine_of.begun_with(begun)


def _whatever_fits(engine_of: OpenEngine) -> OpenEngine:
    """For another package than the one that is trained: what suits that one may not suit this one."""
    return engine_of.for_any_package() if isinstance(engine_of, EngineChoice) else engine_of


def _keep_engine(run: RunFolder, engine: Engine) -> None:
    """Losses of two engines differ in their last bits, so a run that mixed them would be no function of its
    definition.

    Raises:
        InputError: the run began with another engine.
    """
    begun, name = _engine_name(run), engine.info()["name"]
    if begun not in (None, name):
        raise InputError(
            f"expected engine {begun!r}, with which this run began, got {name!r}: "
            f"go on with --engine {begun}, or begin another run with --seed"
        )
    run.once("engine", lambda: dict(engine.info()))


def _engine_name(run: RunFolder) -> str | None:
    """The engine of a run that has computed something; before there was a choice it was torch."""
    if (known := run.load("engine")) is not None:
        return str(known["name"])
    return "torch" if run.load("plan") is not None else None


def _activate_again(home: Home, run: RunFolder, package: Package) -> None:
    """After `reset` or `rollback`, the same command brings the run back that was adopted before."""
    decision = run.load("decision") or {}
    if decision.get("adopted"):
        incumbent = Active(**decision["incumbent"])
        if active_model(home) == incumbent:
            activate(home, Active(package=package.digest, run=run.name), expected=incumbent)


def _refused(
    home: Home,
    release: InstalledRelease,
    package: Package,
    options: TrainOptions,
    documents: Sequence[Document],
    report: DataReport,
    message: str,
) -> RunResult:
    """The end of a run that has too little text to begin: reported once for the same text."""
    digest = hashlib.sha256("\0".join(document.group for document in documents).encode()).hexdigest()
    run = _run(home, package, options, f"refused:{digest}", (), report)
    facts = RunFacts(release=release, options=options, k=package.k, outcome=Outcome.REFUSED_DATA, seconds=0.0)
    metrics = run_metrics(facts).model_dump(mode="json")
    known = run.load("outcome") is not None
    end = run.once("outcome", lambda: {"message": message, "metrics": metrics, "data": report.as_json()})
    return result_of(run, end, known=known)
