"""Clients that repeat each request with the same key, to either API, until they get an answer."""

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from permille.choices import EstimatorKind
from permille.package.manifest import Manifest
from permille.schemas.runs import LOG_MEDIA_TYPE
from permille.zo.header import LogHeader, Schedule
from permille.zo.lattice import state_digest
from permille.zo.log import decode_canonical, encode_canonical
from permille.zo.records import StepFlag, StepRecord
from permille.zo.replay import replay
from tests.api_service import Api, TestDevice, run_metrics
from tests.chaos.site import Site
from tests.packages import TINY_LLAMA
from tests.rounds import site as federations
from tests.tiny_model import write_corpus, write_model

MODEL: Final = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 280,
}
SHARES: Final = {
    "replay": 44,
    "mask": 20,
    "quantization": 10,
    "package": 7,
    "round": 5,
    "private": 1,
    "fisher": 5,
    "build": 5,
    "shards": 2,
    "sparsification": 1,
    "export": 0.5,
}
"""Weights of the kinds of jobs, about 100 in total. Most jobs are short, some need torch."""
CAN_EXPORT: Final = find_spec("executorch") is not None
DEVICES, MEMBERS, PRIVATE_ROUNDS = 6, 3, 10
TWICE, IMPATIENT, CANCELLED = 0.1, 0.05, 0.01
"""Probabilities that a job is requested twice at once, a request abandoned early, a job cancelled."""
_AGAIN = frozenset({429, 500, 502, 503, 504})
_PATIENCE_S, _ANSWER_S, _IMPATIENT_S = 600.0, 20.0, 0.02
RELEASE: Final = "tiny"


class Patient(httpx.Client):
    """A client that repeats a request, to a random API each time, until it gets an answer."""

    def __init__(self, site: Site, rng: random.Random, impatient: float = 0.0) -> None:
        super().__init__(trust_env=False, timeout=_ANSWER_S, base_url="http://127.0.0.1")
        self._site, self._rng, self._impatient = site, rng, impatient
        self.refused: Counter[str] = Counter()

    def request(self, method: str, url: Any, **options: Any) -> httpx.Response:
        until = time.monotonic() + _PATIENCE_S
        while True:
            base, hurried = self._rng.choice(self._site.urls), self._rng.random() < self._impatient
            timeout = _IMPATIENT_S if hurried else _ANSWER_S
            try:
                answer = super().request(method, f"{base}{url}", **{**options, "timeout": timeout})
            except httpx.TransportError as exc:
                self.refused[type(exc).__name__] += 1
            else:
                if answer.status_code not in _AGAIN:
                    return answer
                self.refused[f"{answer.status_code} {_told(answer)}"] += 1
            if time.monotonic() > until:
                raise TimeoutError(f"expected an answer to {method} {url} within {_PATIENCE_S:.0f} s")
            time.sleep(self._rng.uniform(0.05, 0.5))


def _told(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("detail", ""))[:80]
    except ValueError:
        return answer.text[:80]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted jobs. They are kept in a file, so that a later run can continue."""

    path: Path
    ids: dict[str, list[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path) -> "Accepted":
        ids: dict[str, list[str]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            key, job_id = json.loads(line)
            ids.setdefault(key, []).append(job_id)
        return cls(path, ids)

    def add(self, key: str, *job_ids: str) -> None:
        with self.lock, self.path.open("a") as file:
            for job_id in job_ids:
                file.write(f"{json.dumps([key, job_id])}\n")
            self.ids.setdefault(key, []).extend(job_ids)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class World:
    """The inputs of jobs: a model, a corpus, a mask, a quantization, a package, devices and federations."""

    api: Api
    model_id: str
    corpus_id: str
    mask_id: str
    quantization_id: str
    package: Manifest
    devices: list["Device"] = field(default_factory=list)
    sites: dict[str, list[federations.Site]] = field(default_factory=dict)


@dataclass(slots=True)
class Device:
    """A device that shares logs."""

    device: TestDevice
    secret: str

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request. If the token has expired, get a new one."""
        while True:
            headers = {**self.device.api.auth(self.secret), **options.pop("headers", {})}
            client: Any = self.device.api.client
            answer: httpx.Response = client.request(method, path, headers=headers, **options)
            if answer.status_code != 401:
                return answer
            self.secret = fresh_token(self.device)
            options["headers"] = {name: value for name, value in headers.items() if name != "Authorization"}


def fresh_token(device: TestDevice) -> str:
    """Return a new token. Try again if an answer, and with it the nonce, was lost."""
    while True:
        answer = device.ask_token(device.nonce())
        if answer.status_code == 201:
            return str(answer.json()["access_token"])


def api_of(site: Site, rng: random.Random, impatient: float = 0.0) -> Api:
    """Return a client of the API that repeats its requests."""
    service: Any = None  # the service runs in other processes
    client: Any = Patient(site, rng, impatient)
    return Api(client=client, service=service, token=site.token)


def prepare(site: Site, rng: random.Random) -> World:
    """Register, build and publish the inputs of jobs before the faults begin."""
    data, api = site.root / "data", api_of(site, rng)
    write_model(data / "models" / RELEASE, config={**TINY_LLAMA, **MODEL})
    write_corpus(data / "corpora" / "texts.jsonl")

    def made(path: str, body: object, key: str) -> dict[str, Any]:
        answer = api.post(path, body, key=f"prepare-{key}")
        assert answer.status_code in (200, 201, 202), answer.text
        record: dict[str, Any] = answer.json()
        return record

    model = made("/v1/models", {"name": RELEASE, "source": {"kind": "folder", "path": RELEASE}}, "model")[
        "id"
    ]
    texts = {"name": "texts", "source": {"kind": "file", "path": "texts.jsonl"}}
    corpus = made("/v1/corpora", texts, "corpus")["id"]
    mask = {"method": "random", "density": 0.05}
    build = made("/v1/builds", {"model_id": model, "mask": mask}, "build")
    job = wait_for(api, build["id"])
    digest = job["result_id"]
    parts = [api.get(f"/v1/jobs/{part}").json() for part in job["children"]]
    made("/v1/releases", {"name": RELEASE, "package_digest": digest, "alias": "stable"}, "release")
    manifest = Manifest.from_bytes(api.get(f"/v1/packages/{digest}/manifest").content)
    results = {part["kind"]: part["result_id"] for part in parts}
    return World(
        api=api,
        model_id=model,
        corpus_id=corpus,
        mask_id=results["mask"],
        quantization_id=results["quantization"],
        package=manifest,
    )


def enrol(world: World, name: str, private: int) -> None:
    """Make devices, a federation, and federations for `private` private rounds. Each run makes new ones."""
    for _ in range(DEVICES):
        device = enrolled(world.api)
        world.devices.append(Device(device, fresh_token(device)))
    promises: dict[str, Any] = {
        "privacy": {"dp_epsilon": 1000.0, "participations": PRIVATE_ROUNDS},
        "clip": 2000,
    }
    asked: dict[str, Any] = {"target": MEMBERS, "minimum": MEMBERS, "deadline_s": 86_400}
    few = {**asked, **promises, "rounds": PRIVATE_ROUNDS}
    world.sites = {
        "round": [federations.make_site(world.api, **asked, name=name, rounds=1000)],
        "private": [
            federations.make_site(world.api, **few, name=f"{name}-private-{number}")
            for number in range(-(-private // PRIVATE_ROUNDS))
        ],
    }
    for site in (site for sites in world.sites.values() for site in sites):
        site.join(MEMBERS)


def enrolled(api: Api) -> TestDevice:
    """Return an enrolled device, even if answers were lost."""
    device = TestDevice(api=api, key=Ed25519PrivateKey.generate())
    while True:
        invited = api.post("/v1/invitations", {"release": RELEASE, "alias": "stable"}).json()
        answer = device.enrol(invited["invitation"])
        if answer.status_code in (200, 201):
            device.id = answer.json()["device_id"]
            return device


def wait_for(api: Api, job_id: str, *, timeout_s: float = 300.0) -> dict[str, Any]:
    """Wait until a job has succeeded. Return the job."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        job: dict[str, Any] = api.get(f"/v1/jobs/{job_id}").json()
        if job["state"] == "succeeded":
            return job
        assert job["state"] in ("queued", "running"), job
        time.sleep(0.2)
    raise TimeoutError(f"expected {job_id} to succeed within {timeout_s:.0f} s")


def plan(jobs: int, seed: int) -> list[tuple[str, str]]:
    """Return the key and the kind of each job, shuffled. Exports are included if an exporter is installed."""
    rng = random.Random(f"plan {seed}")
    shares = {kind: share for kind, share in SHARES.items() if kind != "export" or CAN_EXPORT}
    kinds = rng.choices(list(shares), weights=list(shares.values()), k=jobs)
    kinds[: len(shares)] = list(shares)[:jobs]  # at least one of each kind
    rng.shuffle(kinds)
    return [(f"chaos-{seed}-{number}", kind) for number, kind in enumerate(kinds)]


class Clients:
    """Threads that send the planned jobs while few jobs are unfinished."""

    def __init__(self, world: World, accepted: Accepted, may_send: Callable[[], bool]) -> None:
        self._world, self._accepted, self._may_send = world, accepted, may_send
        self._rounds = threading.Lock()
        self._lock = threading.Lock()
        self.apis: list[Api] = []
        self.failures: list[str] = []
        self.cancelled = 0

    def run(self, site: Site, planned: list[tuple[str, str]], *, seed: int, threads: int = 4) -> None:
        """Send everything. Return when the last job is accepted, or when no more may be sent."""
        todo = iter([one for one in planned if one[0] not in self._accepted.ids])

        def serve(number: int) -> None:
            rng = random.Random(f"client {seed} {number}")
            api = api_of(site, rng, IMPATIENT)
            self.apis.append(api)
            for key, kind in self._taken(todo):
                try:
                    self._send(api, rng, key, kind)
                except Exception as exc:  # noqa: BLE001 - a failure of the run, reported at its end
                    self.failures.append(f"{key} ({kind}): {type(exc).__name__}: {exc}")

        workers = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _taken(self, todo: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        while self._may_send():
            with self._lock:
                one = next(todo, None)
            if one is None:
                return
            yield one

    def _send(self, api: Api, rng: random.Random, key: str, kind: str) -> None:
        if kind in self._world.sites:
            with self._rounds:  # the next round opens when this one is published
                self._round(key, kind)
        elif kind == "replay":
            self._replay(rng, key)
        else:
            path, body = request_of(self._world, kind, key)
            self._post(api, rng, key, f"{path}?again=true", body)

    def _post(self, api: Api, rng: random.Random, key: str, path: str, body: Mapping[str, object]) -> None:
        answers: list[httpx.Response] = []

        def post() -> None:
            answers.append(api.post(path, body, key=key))

        twice = [threading.Thread(target=post, daemon=True)] if rng.random() < TWICE else []
        for other in twice:
            other.start()
        post()
        for other in twice:
            other.join()
        for answer in answers:
            assert answer.status_code == 202, f"{answer.status_code} {answer.text}"
        self._accepted.add(key, *(str(answer.json()["id"]) for answer in answers))
        if rng.random() < CANCELLED:
            self.cancelled += 1
            assert api.post(f"/v1/jobs/{answers[0].json()['id']}/cancel").status_code in (200, 202)

    def _replay(self, rng: random.Random, key: str) -> None:
        device = rng.choice(self._world.devices)
        data, claimed = some_log(self._world.package, int(key.rpartition("-")[2]))
        run_id = str(uuid.uuid5(uuid.NAMESPACE_URL, key))
        metrics = run_metrics(package_digest=self._world.package.digest, state_digest=claimed)
        answer = device.call("POST", "/v1/runs", json={"run_id": run_id, "metrics": metrics})
        assert answer.status_code in (200, 201), answer.text
        kind_of_bytes = {"Content-Type": LOG_MEDIA_TYPE}
        answer = device.call("PUT", f"/v1/runs/{run_id}/log", content=data, headers=kind_of_bytes)
        assert answer.status_code == 202, answer.text
        self._accepted.add(key, str(answer.json()["job_id"]))

    def _round(self, key: str, kind: str) -> None:
        found = ((site, site.read()) for site in self._world.sites[kind])
        site, number = next((site, read["number"]) for site, read in found if read["state"] == "running")
        for member in site.members:
            member.secret = fresh_token(member.device)
            answer = site.take_part(member)
            assert answer is not None, f"expected an invitation to round {number}"
            assert answer.status_code in (200, 201, 202, 204), answer.text
        until = time.monotonic() + _PATIENCE_S
        while site.read()["number"] == number:
            assert time.monotonic() < until, f"expected round {number} to end"
            time.sleep(0.2)
        jobs = site.api.get("/v1/jobs?kind=round&limit=1").json()["items"]
        self._accepted.add(key, jobs[0]["id"])


def request_of(world: World, kind: str, key: str) -> tuple[str, dict[str, object]]:
    """Return the path and the body of the request for a job of this kind."""
    seed = int(key.rpartition("-")[2])
    model, corpus = {"model_id": world.model_id}, {"corpus_id": world.corpus_id}
    fisher = {**model, **corpus, "method": "fisher", "density": 0.05, "length": 16, "seed": seed}
    random_mask = {"method": ("random", "magnitude")[seed % 2], "density": 0.05, "seed": seed}
    schemes: tuple[dict[str, object], ...] = (
        {"scheme": "nf4"},
        {"scheme": "int4", "group_size": 32},
        {"scheme": "int8"},
    )
    trained = {"adapter": {"kind": "lora-fa", "rank": 2}} if seed % 3 == 0 else {"mask": random_mask}
    measured = {"evaluation_corpus_id": world.corpus_id} if seed % 5 == 0 else {}
    few = {"sequences": 1, "length": 16, "evaluation_sequences": 1, "seed": seed}
    small = {"variants": 1 + seed % 2, "rows": 2, "tokens": 8}
    parts = {"mask_id": world.mask_id, "quantization_id": world.quantization_id}
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "mask": ("masks", {**model, **random_mask}),
        "fisher": ("masks", {**fisher, "sequences": 1 + seed % 2}),
        "shards": ("masks", {**fisher, "sequences": 17}),
        "quantization": (
            "quantizations",
            {**model, **measured, "options": {**schemes[seed % 3], "evaluation_tokens": 256}},
        ),
        "package": ("packages", dict(parts)),
        "build": ("builds", {**model, **trained}),
        "sparsification": ("sparsifications", {**model, **corpus, **few, "name": key}),
        "export": ("exports", {**small, "package_digest": world.package.digest}),
    }
    collection, body = asked[kind]
    return f"/v1/{collection}", body


def some_log(manifest: Manifest, seed: int) -> tuple[bytes, str]:
    """Return a log of some steps on a package, and the digest of the state after these steps."""
    header = LogHeader(
        package_digest=manifest.digest,
        mask_digest=manifest.mask_digest,
        seed=seed,
        estimator=EstimatorKind.SPSA,
        queries=2,
        epsilon=1e-2,
        learning_rate=1e-2,
        schedule=Schedule.CONSTANT,
        total_steps=5,
        step_unit_exponent=-20,
        counts=manifest.counts,
    )
    records = [
        StepRecord(step=step, coefficients=(step + 1, -3 * step), loss=1.0, flags=StepFlag.NONE)
        for step in range(5)
    ]
    data = encode_canonical(header, records)
    s_K = replay(header, decode_canonical(data, max_bytes=1 << 20, max_steps=100).coefficients_TQ)
    digest = state_digest(s_K, mask_digest=header.mask_digest, step_unit_exponent=header.step_unit_exponent)
    return data, digest
