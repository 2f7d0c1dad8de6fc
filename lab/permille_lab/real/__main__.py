"""Measure the gains and costs of personal models of SmolLM2-135M-Instruct: `make bench-real`.

    PERMILLE_DATA=DIR python -m permille_lab.real --people 10 --seeds 0

People are ten authors of tweets (LaMP-7) and the gardener of the examples. 30 % of a person's text is held
out. The rest trains and selects the state. The figure `people` measures the loss of the held-out text and the
rise of the loss of general text, for these states:

    base       the package
    own        the agent's training on the person's text, at the strength that the agent chooses
    other      the own state of the next person
    pooled     the same training on as many tokens of other people
    prompt     the base, with the person's train text before the document, as much as fits in 1,024 tokens
    control    the base, with the next person's train text before the document
    both       the prompt together with the own state
    lora       peft's LoRA (rank 8, AdamW at 0.001) of the same base in float32, with as many steps

The other figures are:

    memory     the memory of a training above the package, for own and lora
    tasks      accuracy of multiple choice without examples, for the base and a trained state
    decode     tokens per second, and those of llama.cpp on the GGUF file
    shapes     a step of one row in the shapes of larger models
    learn      training on the user's, the assistant's or all turns of PersonaChat's dialogues
    frontier   sparse values and adapters, by gradient and by zeroth order, at three strengths
    facts      recall of facts that stand in a text, with and without passages, for five people
    second     a model of another family (`--second FILE.gguf`): base, own, prompt and both, for three people

A stopped run continues with the first unfinished cell.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from permille.choices import AdapterKind, Embeddings, EstimatorKind
from permille.engines.factory import LIGHT, open_engine
from permille.engines.interface import Engine
from permille.package.build import ChosenAdapter
from permille.zo.estimators import Batch
from permille_agent.embed import (
    Learn,
    TokenizedDocument,
    TrainingBatches,
    TrainOptions,
    packed_rows,
)
from permille_lab.engine import gradients
from permille_lab.engine.decode import llama_cpp_seconds, token_seconds
from permille_lab.engine.sizes import Sizes
from permille_lab.evaluate.cell_data import Encoder
from permille_lab.measuring.cells import Cells, Result, settings_parser
from permille_lab.measuring.dense import dense_model, mean_loss
from permille_lab.measuring.machine import AnonymousPeak, machine, resident
from permille_lab.measuring.model_packages import SMOLLM2_FILE, Sources, folder_from_environment
from permille_lab.people.study import Person, targets
from permille_lab.people.user_texts import Collection, User, cohort, read_users
from permille_lab.real import conversations, facts
from permille_lab.real.page import STRENGTHS, State, Trainable
from permille_lab.real.subjects import (
    LEAST_CHARACTERS,
    LONGEST,
    Subject,
    gardener,
    general_batches,
    general_of,
    nats_of,
    open_subject,
)
from permille_lab.tasks.examples import Task
from permille_lab.tasks.rows import read_file
from permille_lab.tasks.scoring import encode_example, score
from permille_lab.tasks.splits import split

STEPS, DENSITY = 20, 0.001
_LORA_RANK, _LORA_RATE = 8, 1e-3
_ITEMS = 400
_COHORT = 10
_DECODE_ROUNDS = 5
_FIGURES = ("memory", "decode", "shapes", "people", "tasks", "learn", "frontier", "facts", "second")
_SECOND_PEOPLE = 3
_SPEAKER = "GLOUCESTER"
_METHODS = {"gradient": EstimatorKind.GRADIENT, "zeroth-order": EstimatorKind.ONE_SIDED}
_TASKS = {
    Task.SST2: "SST-2_glue/dev.tsv",
    Task.RTE: "RTE/train.jsonl",
    Task.BOOLQ: "BoolQ/val.jsonl",
    Task.COPA: "COPA/train.jsonl",
}
_TRAINABLES: dict[Trainable, float | ChosenAdapter] = {
    Trainable.SPARSE: DENSITY,
    Trainable.LORA_FA_1: ChosenAdapter(kind=AdapterKind.LORA_FA, rank=1, alpha=16),
    Trainable.LORA_1: ChosenAdapter(kind=AdapterKind.LORA, rank=1, alpha=16),
    Trainable.LORA_8: ChosenAdapter(kind=AdapterKind.LORA, rank=8, alpha=16),
}


class Bench:
    """Inputs of every cell: the subject, the people in their order, and the general text."""

    def __init__(self, subject: Subject, people: Sequence[User], general: Sequence[Batch]) -> None:
        self.subject, self.people, self.general = subject, people, general
        self.engine, self.package = subject.study.engine, subject.study.package

    def state(self, person: Person) -> tuple[NDArray[np.float32], float]:
        """Return the trained values at full strength, and the processor seconds. Both are cached."""
        options = self.subject.study.options
        name = (
            f"{person.name}-{options.estimator}-{options.steps}-{options.seed}-{self.package.digest[-8:]}.npz"
        )
        path = self.subject.study.folder / name
        if not path.exists():
            begun = time.process_time()
            values_K, _ = self.subject.study.train(person, "own")
            np.savez(path, values_K=values_K, seconds=time.process_time() - begun)
        found = np.load(path)
        return found["values_K"], float(found["seconds"])

    def kept(self, values_K: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
        """Return the values at the strength that the agent chooses, and this strength in eighths."""
        eighths = self.subject.strength(values_K).eighths
        return self.subject.at(values_K, eighths), eighths

    def nats(self, values_K: NDArray[np.float32], documents: Sequence[TokenizedDocument]) -> float:
        return nats_of(self.engine, values_K, documents)

    def general_nats(self, values_K: NDArray[np.float32]) -> float:
        return general_of(self.engine, values_K, self.general)

    def measured(self, user: User, next_user: User) -> Result:
        """Measure all states of one person on the held-out text."""
        study = self.subject.study
        person = study.person(user)
        base_K = self.package.values()
        trained_K, seconds = self.state(person)
        own_K, strength = self.kept(trained_K)
        other_K, _ = self.kept(self.state(study.person(next_user))[0])
        pooled_K, _ = self.kept(study.train(study.pooled(person, self.people), "pooled")[0])
        prompted = [_after(person.train, document) for document in person.test]
        states = {State.BASE: base_K, State.OWN: own_K, State.OTHER: other_K, State.POOLED: pooled_K}
        nats = {state.value: self.nats(values_K, person.test) for state, values_K in states.items()}
        general = {state.value: self.general_nats(values_K) for state, values_K in states.items()}
        nats[State.PROMPT.value] = self.nats(base_K, prompted)
        nats[State.BOTH.value] = self.nats(own_K, prompted)
        lora = self._lora(person)
        nats[State.LORA.value], general[State.LORA.value] = lora.pop("nats"), lora.pop("general")
        return {
            "user": user.name,
            "nats": nats,
            "general": general,
            "strength": strength,
            "train_tokens": targets(person.train),
            "test_tokens": targets(person.test),
            "seconds": {"own": round(seconds, 1), **lora},
            "peak_bytes": resident(),
            "machine": machine(),
        }

    def second(self, user: User) -> Result:
        """Measure a person's state on a model of another family. Report each general text separately."""
        person = self.subject.study.person(user)
        base_K = self.package.values()
        own_K, strength = self.kept(self.state(person)[0])
        prompted = [_after(person.train, document) for document in person.test]
        half = len(self.general) // 2
        general = {"WikiText-2": self.general[:half], "C4": self.general[half:]}
        return {
            "nats": {
                State.BASE.value: self.nats(base_K, person.test),
                State.OWN.value: self.nats(own_K, person.test),
                State.PROMPT.value: self.nats(base_K, prompted),
                State.BOTH.value: self.nats(own_K, prompted),
            },
            "general": {
                name: [general_of(self.engine, values_K, part) for values_K in (base_K, own_K)]
                for name, part in general.items()
            },
            "strength": strength,
            "train_tokens": targets(person.train),
            "test_tokens": targets(person.test),
        }

    def control(self, user: User, next_user: User) -> Result:
        """Measure the base after another person's text.

        Its gain is the part of a prompt's gain that comes from the form of the text, not from the person.
        """
        study = self.subject.study
        shown = study.person(next_user).train
        prompted = [_after(shown, document) for document in study.person(user).test]
        return {"user": user.name, "nats": self.nats(self.package.values(), prompted)}

    def memory(self, user: User) -> Result:
        """Measure the anonymous memory of the agent's training and of peft's LoRA."""
        person = self.subject.study.person(user)
        before = resident()["RssAnon"]
        # Use a new folder, because a finished run would not be repeated.
        with tempfile.TemporaryDirectory() as folder, AnonymousPeak() as own:
            replace(self.subject.study, folder=Path(folder)).train(person, "memory")
        with AnonymousPeak() as lora:
            self._lora(person)
        return {"own_bytes": own.bytes - before, "lora_bytes": lora.bytes - before}

    def frontier(self, user: User) -> Result:
        """Return the held-out and the general loss of one trained state at several strengths."""
        person = self.subject.study.person(user)
        trained_K, seconds = self.state(person)
        base_K = self.package.values()
        points = {"0": [self.nats(base_K, person.test), self.general_nats(base_K)]}
        for eighths in STRENGTHS:
            values_K = self.subject.at(trained_K, eighths)
            points[str(eighths)] = [self.nats(values_K, person.test), self.general_nats(values_K)]
        return {"points": points, "k": self.package.k, "seconds": round(seconds, 1)}

    def task(self, task: Task, path: Path, user: User | None) -> Result:
        """Return the right items of a task, for the base or for a person's state at its strength."""
        values_K = self.package.values()
        if user is not None:
            values_K, _ = self.kept(self.state(self.subject.study.person(user))[0])
        pool = read_file(task, path).examples
        items = split(pool, 0, sizes=(1, 1, min(_ITEMS, len(pool) - 2))).test
        encoder = Encoder(self.subject.folder)
        choices = [encode_example(item, encoder, begin=encoder.begin, max_tokens=LONGEST) for item in items]
        scored = score(partial(self.engine.token_losses, values_K), choices)
        return {"correct": [int(right) for right in scored.correct_N], "loss": scored.loss}

    def decode(self, gguf: Path, threads: int) -> Result:
        """Return the tokens per second of the package and of llama.cpp, as medians of interleaved rounds."""
        engine = open_engine(self.package, LIGHT, threads=threads)
        contenders = {
            "permille": partial(token_seconds, engine, self.package, time.perf_counter),
            "llama.cpp": partial(llama_cpp_seconds, gguf, self.package, threads),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(_DECODE_ROUNDS):
            for name, contender in contenders.items():
                seconds[name] += contender()
        rates = {name: round(1 / statistics.median(found), 2) for name, found in seconds.items()}
        return {
            "tokens_per_s": rates,
            "package_bytes": self.package.size_bytes,
            "gguf_bytes": gguf.stat().st_size,
        }

    def _lora(self, person: Person) -> dict[str, Any]:
        from peft import LoraConfig, get_peft_model

        options = self.subject.study.options
        torch.manual_seed(options.seed)
        begun = time.process_time()
        config = LoraConfig(r=_LORA_RANK, lora_alpha=16, target_modules="all-linear")
        model = get_peft_model(dense_model(self.package, prepacked=False), config)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=_LORA_RATE, weight_decay=0.0)
        batches = TrainingBatches(
            packed_rows(person.train, options.row_tokens), batch_rows=options.batch_rows, seed=options.seed
        )
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = _LORA_RATE * (1 - step / STEPS)
            optimizer.zero_grad()
            torch.autograd.backward(mean_loss(model.base_model.model, batches(step)))
            optimizer.step()
        seconds = round(time.process_time() - begun, 1)
        engine = cast(Engine, _Dense(model.base_model.model))
        no_values = np.empty(0, np.float32)
        return {
            "nats": nats_of(engine, no_values, person.test),
            "general": general_of(engine, no_values, self.general),
            "lora": seconds,
        }


class _Dense:
    """A model of transformers with the method `token_losses` of an engine. It has no sparse values."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def token_losses(self, _: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
        with torch.no_grad():
            ids_BT, target_BT = torch.from_numpy(batch.input_ids_BT), torch.from_numpy(batch.target_BT)
            attention_BT = torch.from_numpy(batch.attention_BT)
            hidden_BTH = self._model.model(ids_BT, attention_mask=attention_BT).last_hidden_state
            logit_RD = self._model.get_output_embeddings()(hidden_BTH[:, :-1][target_BT[:, 1:]])
            losses = torch.nn.functional.cross_entropy(logit_RD, ids_BT[target_BT], reduction="none")
        return np.asarray(losses.numpy(), np.float32)


def _after(shown: Sequence[TokenizedDocument], document: TokenizedDocument) -> TokenizedDocument:
    """Return the document after as much of the shown text as fits. Only the document's tokens are targets."""
    room = LONGEST - len(document.ids_T)
    ids_T = np.concatenate([other.ids_T for other in shown])[: max(room, 0)]
    none_T = np.zeros(len(ids_T), np.bool_)
    return replace(
        document,
        ids_T=np.concatenate([ids_T, document.ids_T]),
        target_T=np.concatenate([none_T, document.target_T]),
        bytes_T=np.concatenate([np.zeros(len(ids_T), np.int64), document.bytes_T]),
    )


def main() -> None:
    """Measure the missing cells."""
    parser = settings_parser(__doc__, "real")
    parser.add_argument("--gguf", type=Path, default=SMOLLM2_FILE, help="the model")
    parser.add_argument("--second", type=Path, help="a model of another family, for the figure `second`")
    parser.add_argument("--people", type=int, default=_COHORT, help="number of authors of tweets")
    parser.add_argument("--frontier-people", type=int, default=_COHORT + 1, help="people in the frontier")
    parser.add_argument("--trainables", nargs="+", choices=list(Trainable), default=list(Trainable))
    parser.add_argument("--frontier-methods", nargs="+", choices=_METHODS, default=list(_METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--figures", nargs="+", choices=_FIGURES, default=_FIGURES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, cells = folder_from_environment("PERMILLE_DATA"), Cells(options.cells)
    sources = Sources(models=options.folder, data=data)
    everybody = cohort(read_users(data, Collection.LAMP7).users, least_characters=LEAST_CHARACTERS)
    ring = [gardener(), *everybody[:_COHORT]]
    people = ring[: options.people + 1]

    def bench(trainable: Trainable, told: TrainOptions, gguf: Path = options.gguf) -> Bench:
        trained = _TRAINABLES[trainable]
        subject = open_subject(sources, gguf, options.folder, trained=trained, options=told)
        return Bench(subject, everybody, general_batches(subject.folder, data))

    for seed in options.seeds:
        along = TrainOptions(seed=seed, steps=STEPS)
        if "second" in options.figures and options.second is not None:
            second_bench = bench(Trainable.SPARSE, along, options.second)
            for user in ring[:_SECOND_PEOPLE]:
                settings = {"model": options.second.stem, "user": user.name, "seed": seed, "steps": STEPS}
                cells.once("second", settings, partial(second_bench.second, user))
        if {*options.figures} == {"second"}:
            continue
        main_bench = bench(Trainable.SPARSE, along)
        if "memory" in options.figures:  # first, since reused memory of earlier work would not be counted
            cells.once("memory", {"user": people[0].name}, partial(main_bench.memory, people[0]))
        if "people" in options.figures:
            for user, next_user in zip(people, [*ring[1:], ring[0]], strict=False):
                settings = {"user": user.name, "seed": seed, "steps": STEPS}
                cells.once("people", settings, partial(main_bench.measured, user, next_user))
                cells.once("control", settings, partial(main_bench.control, user, next_user))
        if "tasks" in options.figures:
            for trained in (None, people[0]):
                name = None if trained is None else trained.name
                for task, path in _TASKS.items():
                    settings = {"task": task.value, "user": name, "seed": seed}
                    measure = partial(main_bench.task, task, data / "tasks" / path, trained)
                    cells.once("tasks", settings, measure)
        if "decode" in options.figures:
            measure = partial(main_bench.decode, options.gguf, options.threads)
            cells.once("decode", {"threads": options.threads}, measure)
        if "shapes" in options.figures:
            for shape, tokens in (("0.5B", 256), ("1.1B", 256), ("0.5B", 1024)):
                sizes = Sizes(
                    shape=shape, layers=None, sequences=1, tokens=tokens, rounds=1, tables=Embeddings.Q8_0
                )
                cells.once("shapes", sizes.settings(), partial(gradients.measure, options.folder, sizes))
        if "learn" in options.figures:
            count = conversations.LEARNED + conversations.SELECTED + conversations.JUDGED
            documents = conversations.dialogues(data, options.folder / "real", count)
            for learn in Learn:
                measure = partial(
                    conversations.measure, main_bench.subject, documents, learn, main_bench.general
                )
                cells.once("learn", {"learn": learn.value, "seed": seed, "steps": STEPS}, measure)
        if "facts" in options.figures:
            speakers = read_users(data, Collection.SHAKESPEARE).users
            speaker = next(user for user in speakers if user.name == _SPEAKER)
            authors = [ring[0], facts.diary(data, "pepys"), facts.diary(data, "muir"), speaker, ring[1]]
            authors = authors[: options.people + 1]
            for contenders, user in product((facts.UNTRAINED, facts.TRAINED), authors):
                settings = {"text": user.name, "contenders": list(contenders), "seed": seed, "steps": STEPS}
                measure = partial(facts.measure, main_bench.package, user, contenders, steps=STEPS, threads=1)
                cells.once("facts", settings, measure)
        if "frontier" in options.figures:
            for method, trainable in product(options.frontier_methods, map(Trainable, options.trainables)):
                told = TrainOptions.of(_METHODS[method], seed=seed, steps=STEPS)
                opened = bench(trainable, told)
                for user in people[: options.frontier_people]:
                    settings = {"trainable": trainable.value, "method": method, "user": user.name}
                    cells.once("frontier", settings | {"seed": seed}, partial(opened.frontier, user))


if __name__ == "__main__":
    main()
