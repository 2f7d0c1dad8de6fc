"""Training of a personal model, from files with text to an adopted state.

    read text -> plan -> steps -> decision -> activate -> outcome

`run_training` resumes the run if the same request was interrupted. The caller holds the writers' lock.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from permille.engines.interface import Engine, remembering
from permille.engines.memory import most_positions
from permille.errors import InputError, OperatorError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.schemas.runs import Outcome
from permille.training.reference import Reference
from permille_agent.state.home import Home, stored_path, telling_disk
from permille_agent.state.models import (
    Active,
    InstalledRelease,
    activate,
    active_model,
    installed_release,
    nothing_installed,
    opening,
    referenced_models,
)
from permille_agent.text.notes import index_text
from permille_agent.text.preparation import NEEDED_TOKENS, Prepared, Split, prepare, prepare_untested
from permille_agent.text.reading import read_documents
from permille_agent.text.report import DataReport
from permille_agent.text.tokens import package_tokenizer
from permille_agent.training.decision import Decision, OpenModel, decide_adoption, decide_untested
from permille_agent.training.engines import (
    EngineChoice,
    EngineUsed,
    RunInterrupted,
    interruptible,
)
from permille_agent.training.memory import make_memory, store_memory
from permille_agent.training.options import RunContext, TrainOptions
from permille_agent.training.outcome import (
    LogFacts,
    RunFacts,
    RunOutcome,
    RunResult,
    TextSource,
    lay_out_log,
    result_of,
    run_outcome,
)
from permille_agent.training.personal import (
    find_start,
    model_values,
    personal_memory,
    start_state,
    store_state,
)
from permille_agent.training.plan import Plan, RunFailed, make_plan
from permille_agent.training.run import (
    AgreedTo,
    BegunRun,
    LearnedText,
    Run,
    RunClock,
    RunDefinition,
    RunFolder,
    open_run,
    prune_runs,
)
from permille_agent.training.steps import FAILED, SelectedState, train

KNOWN_TEXT = (
    "The model in use has learned from all of this text, so none is left to test a new model. Add text, or "
    "begin again with `permille-agent reset`. Directly after `reset`, `permille-agent rollback` brings the "
    "current model back."
)


def run_training(
    home: Home, data_paths: Sequence[Path], options: TrainOptions, context: RunContext = RunContext()
) -> RunResult:
    """Train the installed package on the text in `data_paths`, and adopt a significantly better result.

    After a kill, the same call resumes the run. With a fixed number of steps, the result has the same bits as
    without the kill. For example:

        with hold_lock(home, "train"):
            result = run_training(home, [Path("notes")], TrainOptions(minutes=20))

    Raises:
        InputError: the paths or options cannot be used.
        OperatorError: no package is installed.
        PackageError: the package or a state is damaged.
    """
    release = installed_release(home)
    if release is None:
        raise OperatorError(nothing_installed(home))
    with opening(home, release.manifest_digest):
        package = Package.open(BlobFolder(home.blobs), release.manifest_digest)
        # Check all hashes now. Otherwise, a damaged tensor would be found only when the training reads it.
        package.check_blocks()
    options = options.within(_positions(package), _remembered(home, package), most_positions(package))
    context.progress.phase("reading the text")
    documents, report = read_documents(data_paths)
    context.progress.phase(f"text: {report.summary()}")
    try:
        index_text(home, documents, data_paths)
    except OperatorError as exc:  # the index serves answers, so the training goes on without it
        context.progress.phase(str(exc))
    task = _Task(home, release, package, options, report, context)
    tokenizer = package_tokenizer(package, options.learn)
    try:
        prepared = prepare(documents, tokenizer, row_tokens=options.row_tokens, report=report)
    except InputError as exc:
        with telling_disk(), suppress(InputError):
            if task.may_remember():
                untested = prepare_untested(documents, tokenizer, row_tokens=options.row_tokens)
                return task.remember(untested, data_paths)
        return task.refuse([document.group for document in documents], str(exc))
    if prepared.stages and options.has_log:
        got = prepared.counts[Split.TRAIN].tokens
        return task.refuse(
            [document.group for document in documents],
            f"Zeroth order needs at least {NEEDED_TOKENS} tokens of text, got {got}. Add text, or train with "
            "--method gradient.",
        )
    with telling_disk():
        return task.train(prepared, data_paths)


@dataclass(frozen=True, slots=True)
class _Task:
    """A request to train."""

    home: Home
    release: InstalledRelease
    package: Package
    options: TrainOptions
    report: DataReport
    context: RunContext

    def refuse(self, groups: Sequence[str], message: str) -> RunResult:
        """End a run whose text cannot be used. The same text is reported only once."""
        # Refused text may have no rows, so its groups identify it.
        digest = hashlib.sha256("\0".join(groups).encode()).hexdigest()
        with telling_disk():
            folder = self._open_run(f"refused:{digest}", ())
            known = folder.load("outcome", RunOutcome) is not None
            facts = self._facts(Outcome.REFUSED_DATA, folder)
            end = folder.once("outcome", RunOutcome, lambda: run_outcome(facts, message, self.report))
            return result_of(folder, end, known=known)

    def train(self, prepared: Prepared, data_paths: Sequence[Path]) -> RunResult:
        """Find or create the run, and complete it."""
        start = find_start(self.home, self.package, prepared, self.options)
        folder = RunFolder(self.home.runs / self._definition(prepared.digest, start).name())
        if folder.path.exists():
            return self._train(prepared, data_paths, start)
        if self.options.memory and (self.context.share_log or self.context.share_state):
            # No server can judge a model with a memory, because the memory never leaves the device.
            self.context.progress.phase("no memory: this run shares its log or state")
            return replace(self, options=replace(self.options, memory=0)).train(prepared, data_paths)
        if prepared.stages and self._active_knows(prepared):
            return self.refuse(prepared.groups, KNOWN_TEXT)
        try:
            return self._train(prepared, data_paths, start)
        except InputError:
            if folder.load("plan", Plan) is None:  # the run was refused, so there is nothing to resume
                folder.delete()
            raise

    def may_remember(self) -> bool:
        """Return whether a text that is too short for a test can become a memory.

        A model that was tested is not replaced by one that was not.
        """
        active, tested = active_model(self.home), False
        if active is not None and active.run is not None:
            decision = RunFolder(self.home.runs / active.run).load("decision", Decision)
            tested = decision is not None and decision.number > 0
        shares = self.context.share_log or self.context.share_state
        return self.options.memory > 0 and not tested and not shares

    def remember(self, prepared: Prepared, data_paths: Sequence[Path]) -> RunResult:
        """Make a memory of a text that is too short for a test.

        Raises:
            InputError: the engine cannot compute a memory.
        """
        known = RunFolder(self.home.runs / self._definition(prepared.digest, None).name()).path.exists()
        folder = self._open_run(prepared.digest, data_paths)
        try:
            return self._resumed(folder, prepared) or self._remember(self._run(folder, prepared, None))
        except InputError:
            if not known:
                folder.delete()
            raise

    def _remember(self, run: Run) -> RunResult:
        remembering(run.engine)  # raises if the engine cannot
        run.folder.once("learned", LearnedText, lambda: LearnedText(groups=run.prepared.groups))
        try:
            decision = decide_untested(run, active_model(self.home) or Active(package=self.package.digest))
        except RunInterrupted as exc:
            return _interrupted(run, exc)
        outcome = Outcome.KEPT_BASE
        if decision.adopted:
            outcome = Outcome.ADOPTED
            new = Active(package=self.package.digest, run=run.folder.name)
            activate(self.home, new, expected=decision.incumbent)
        return self._end(run, self._facts(outcome, run.folder, run, decision=decision), decision.reason)

    def _active_knows(self, prepared: Prepared) -> bool:
        """Return whether the active model has learned from all of the text.

        Then no text is left to judge a new model.
        """
        active = active_model(self.home)
        if active is None or active.run is None:
            return False
        learned = RunFolder(self.home.runs / active.run).load("learned", LearnedText)
        return learned is not None and set(prepared.groups) <= set(learned.groups)

    def _train(self, prepared: Prepared, data_paths: Sequence[Path], start: str | None) -> RunResult:
        folder = self._open_run(prepared.digest, data_paths, start)
        if prepared.stages:
            folder.once("learned", LearnedText, lambda: LearnedText(groups=prepared.groups))
        if self.context.share_log or self.context.share_state:
            # Record the number of withdrawals at the first call. A later withdrawal raises the user's number,
            # and the difference stops the upload.
            folder.once("consent", AgreedTo, lambda: AgreedTo(withdrawals=self.context.withdrawals))
        return self._resumed(folder, prepared) or self._run_to_end(self._run(folder, prepared, start))

    def _resumed(self, folder: RunFolder, prepared: Prepared) -> RunResult | None:
        """Return the result of a run that has ended. Activate its model again if it was rolled back.

        If its memory was erased together with its text, the memory is made again, because the text is back.
        """
        if (ended := folder.load("outcome", RunOutcome)) is None:
            return None
        decision = folder.load("decision", Decision)
        if decision is not None and decision.part.has_memory and not folder.memory.exists():
            # The start takes no part in a memory, and its run may be gone.
            run = self._run(folder, prepared, None)
            run.progress.phase("reading the text into a memory")
            of_run = Active(package=self.package.digest, run=folder.name)
            values_K = model_values(self.home, of_run, self.package, beside_memory=True)
            try:
                memory = make_memory(run, values_K, decision.beside_memory[1], prepared.read)
            except RunInterrupted as exc:
                return _interrupted(run, exc)
            store_memory(folder, memory)
        self._activate_again(folder)
        return result_of(folder, ended, known=True)

    def _run(self, folder: RunFolder, prepared: Prepared, start: str | None) -> Run:
        self.context.progress.phase("loading the model")
        return Run(
            folder=folder,
            clock=RunClock(folder),
            package=self.package,
            engine=interruptible(self._open_engine(folder), self.context.stop),
            w_base_K=self.package.values(),
            prepared=prepared,
            options=self.options,
            progress=self.context.progress,
            start=start_state(self.home, self.package, start),
            reference=Reference.of(self.package),
            base_file=self.home.base,
        )

    def _run_to_end(self, run: Run) -> RunResult:
        """Run all phases. Durable results of earlier calls are reused."""
        try:
            plan = make_plan(run)
            selected = train(run, plan)
            run.progress.phase("judging on held-out text")
            incumbent = active_model(self.home) or Active(package=self.package.digest)
            decision = decide_adoption(
                self.home, run, selected, incumbent, lambda: self._open(incumbent, run.engine)
            )
        except RunInterrupted as exc:
            return _interrupted(run, exc)
        except RunFailed as exc:
            return self._end(run, self._facts(Outcome.FAILED, run.folder, run), str(exc))
        outcome = self._act(run, decision, selected)
        log = lay_out_log(run, selected, decision, self.context)
        return self._end(run, self._facts(outcome, run.folder, run, plan, decision, log), decision.reason)

    def _act(self, run: Run, decision: Decision, selected: SelectedState) -> Outcome:
        """Activate an adopted state, and return the outcome."""
        if decision.adopted:
            if run.options.has_log:
                store_state(run.folder, selected.s_K)
            new = Active(package=self.package.digest, run=run.folder.name)
            activate(self.home, new, expected=decision.incumbent)
            return Outcome.ADOPTED
        failed = selected.step == 0 and selected.stopped in FAILED
        return Outcome.FAILED if failed else Outcome.KEPT_BASE

    def _end(self, run: Run, facts: RunFacts, message: str) -> RunResult:
        end = run_outcome(facts, message, self.report)
        run.folder.store("outcome", end)
        # Models in use and their predecessors keep their runs, for a rollback.
        used = {model.run for model in referenced_models(self.home) if model.run is not None}
        prune_runs(self.home, keep={run.folder.name, *used})
        return result_of(run.folder, end, known=False)

    def _facts(
        self,
        outcome: Outcome,
        folder: RunFolder,
        run: Run | None = None,
        plan: Plan | None = None,
        decision: Decision | None = None,
        log: LogFacts = LogFacts(),
    ) -> RunFacts:
        return RunFacts(
            release=self.release,
            options=self.options,
            k=self.package.k,
            outcome=outcome,
            began_at=folder.require("run", BegunRun).began_at,
            ended_at=self.context.now(),
            seconds=run.clock.seconds() if run else 0.0,
            prepared=run.prepared if run else None,
            plan=plan,
            decision=decision,
            log=log,
            engine=EngineUsed(**run.engine.info()) if run else None,
        )

    def _definition(self, data_digest: str, start: str | None) -> RunDefinition:
        return RunDefinition(package=self.package.digest, data=data_digest, options=self.options, start=start)

    def _open_run(self, data_digest: str, data_paths: Sequence[Path], start: str | None = None) -> RunFolder:
        folder = open_run(self.home, self._definition(data_digest, start), self.context.now())
        known = folder.load("data", TextSource)
        source = known or TextSource(bad_rows=tuple(self.report.examples))
        # The same text may come from a renamed file later. `data remove` must find its memory by each name.
        paths = [*source.paths, *(stored_path(path.absolute()) for path in data_paths)]
        if (source := replace(source, paths=tuple(dict.fromkeys(paths)))) != known:
            folder.store("data", source)
        return folder

    def _open_engine(self, folder: RunFolder) -> Engine:
        """Open the engine of the run. The first call records it.

        Losses of two engines differ in their last bits, so a run that mixed them would not be reproducible.

        Raises:
            InputError: the run began with another engine or dtype.
        """
        engine_of, begun = self.context.engine_of, folder.load("engine", EngineUsed)
        if isinstance(engine_of, EngineChoice):
            engine_of = engine_of.begun_with(begun.name) if begun else engine_of
        engine = engine_of(self.package)
        used = EngineUsed(**engine.info())
        if begun is not None and begun.name != used.name:
            raise InputError(
                f"This run began with the engine {begun.name!r}, not {used.name!r}. Continue with --engine "
                f"{begun.name}, or begin another run with --seed."
            )
        if begun is not None and begun.compute_dtype != used.compute_dtype:
            raise InputError(
                f"This run began with --dtype {begun.compute_dtype}, not {used.compute_dtype}. Continue with "
                f"--dtype {begun.compute_dtype}, or begin another run with --seed."
            )
        folder.once("engine", EngineUsed, lambda: used)
        return engine

    def _open(self, active: Active, engine: Engine) -> OpenModel:
        """Open the active model. A model of another package gets its own engine."""
        package = self.package
        if active.package != package.digest:
            self.context.progress.phase("loading the model in use, which has another package")
            package = Package.open(BlobFolder(self.home.blobs), active.package)
            engine_of = self.context.engine_of
            engine_of = engine_of.for_any_package() if isinstance(engine_of, EngineChoice) else engine_of
            engine = engine_of(package)
        tokenizer = package_tokenizer(package, self.options.learn)
        memory = personal_memory(self.home, active, package)
        if memory is not None:
            engine = remembering(engine).after(memory, tokenizer.begins)
        return OpenModel(
            engine=engine,
            values_K=model_values(self.home, active, package, beside_memory=memory is not None),
            tokenizer=tokenizer,
            row_tokens=self.options.within(_positions(package), len(memory or ())).row_tokens,
        )

    def _activate_again(self, folder: RunFolder) -> None:
        """Activate an adopted run again if the model before it is in use, for example after a `rollback`."""
        decision = folder.load("decision", Decision)
        if decision is not None and decision.adopted and active_model(self.home) == decision.incumbent:
            new = Active(package=self.package.digest, run=folder.name)
            activate(self.home, new, expected=decision.incumbent)


def _interrupted(run: Run, stop: RunInterrupted) -> RunResult:
    run.clock.store()
    return RunResult(
        run=run.folder.name, run_id=run.folder.run_id, outcome=Outcome.INTERRUPTED, message=str(stop)
    )


def _remembered(home: Home, package: Package) -> int:
    """Return the number of positions of the active model's memory, if it is a model of this package."""
    active = active_model(home)
    if active is None or active.run is None or active.package != package.digest:
        return 0
    try:
        decision = RunFolder(home.runs / active.run).load("decision", Decision)
    except OperatorError:  # such a model cannot be opened, and `--from base` replaces it
        return 0
    parts = None if decision is None else decision.parts
    return parts.tokens if parts is not None and parts.chosen.has_memory else 0


def _positions(package: Package) -> int:
    """Return the largest number of positions of the package's model."""
    return int(package.config.get("max_position_embeddings") or 1 << 31)
