"""Fuzz the HTTP API with schemathesis: authenticated, all checks, no operation excluded for administrators.

    python -m tests.api_fuzz --examples 200
    python -m tests.api_fuzz --examples 200 --database postgresql

There are two passes: all operations as the administrator, and the operations of devices as a device. A model,
a corpus, a finished build, a release and a device exist before the passes, so that requests get further than
status 404. The passes run without a worker: the jobs that schemathesis submits stay queued.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.api_service import new_run_id, run_metrics, running_api
from tests.rounds.site import make_site
from tests.running_service import Running, environment, running_service
from tests.tiny_model import write_corpus, write_model
from tests.unit.store.postgres import empty_database

ALL_PHASES = "examples,coverage,fuzzing,stateful"
UNLIMITED = "1000000000"
DEVICE_OPERATIONS: tuple[str, ...] = (
    "get_own_device",
    "create_nonce",
    "create_run",
    "get_run",
    "put_run_log",
    "delete_run_log",
)
DEVICE_OPERATIONS += (
    "get_trust_metadata",
    "get_trust_target",
    "resolve_alias",
    "get_package_manifest",
    "get_package_blob",
    "head_package_blob",
)
# put_contribution is not listed, because no schema describes the bytes of a contribution.
DEVICE_OPERATIONS += (
    "list_own_federations",
    "put_membership",
    "create_round_invitation",
    "delete_contribution",
    "get_federation_definition",
    "get_federation_history",
    "get_round_record",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    name: str
    returncode: int
    output: str


def fuzz(
    folder: Path,
    url: str,
    *,
    examples: int,
    phases: str = ALL_PHASES,
    seed: int | None = None,
    workers: int = 1,
) -> list[Pass]:
    """Run both passes. The rows are in the database at `url`, all other data is below `folder`."""
    write_model(folder / "models" / "tiny-llama")
    write_corpus(folder / "corpora" / "texts.jsonl")
    roots = ("--model-root", str(folder / "models"), "--corpus-root", str(folder / "corpora"))
    with running_service(folder, *roots, PERMILLE_DATABASE_URL=url) as running:
        known = _stock(running)
    device_token, enrolled = _enrol(folder, url)
    config = _configure(folder, known | enrolled)
    options = ["--checks=all", "--continue-on-failure", "--no-color", "--request-timeout=60"]
    options += [f"--max-examples={examples}", f"--workers={workers}", f"--phases={phases}"]
    options += [] if seed is None else [f"--seed={seed}"]
    device_options = [*options, *(f"--include-operation-id={name}" for name in DEVICE_OPERATIONS)]
    settings = {"PERMILLE_DATABASE_URL": url, "PERMILLE_STREAM_S": "0.5"}
    settings |= {"PERMILLE_SIGN_INS_PER_MINUTE": UNLIMITED}
    with running_service(folder, *roots, "--no-worker", **settings) as running:
        # The device pass is first, because the administrator pass may revoke the device.
        return [
            _run("device", config, running.url, device_token, device_options),
            _run("administrator", config, running.url, running.token, options),
        ]


def _run(name: str, config: Path, url: str, token: str, options: Sequence[str]) -> Pass:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    command += [f"{url}/openapi.json", f"--header=Authorization: Bearer {token}", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=config.parent, check=False
    )
    return Pass(name=name, returncode=done.returncode, output=done.stdout + done.stderr)


def _configure(folder: Path, known: Mapping[str, str]) -> Path:
    """Write a schemathesis configuration with existing values for the path parameters."""
    config = folder / "schemathesis.toml"
    lines = [f"{json.dumps(f'path.{name}')} = {json.dumps(value)}" for name, value in known.items()]
    # A round's number. It is an integer: schemathesis would take a text for an invalid value.
    lines.append('"path.number" = 0')
    # schemathesis cannot send these media types from an example. `test_api_examples.py` sends them.
    for name in ("put_run_log", "put_contribution"):
        lines += ["[[operations]]", f'include-operation-id = "{name}"', "phases.examples.enabled = false"]
    # No schema describes the names of time zones, or the times that come.
    lines += ["[[operations]]", 'include-operation-id = "create_rollout"']
    lines.append('checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422"]')
    config.write_text("\n".join(["[parameters]", *lines, ""]))
    return config


def _stock(running: Running) -> dict[str, str]:
    """Make a build and publish its package. Return the ids by path parameter."""
    model = running.answer("models", "add", "tiny", "--folder", "tiny-llama")
    corpus = running.answer("corpora", "add", "texts", "--file", "texts.jsonl")
    # The build also uses the corpus. An unused corpus could be deleted in a pass, so that later requests for
    # it fail.
    asked = ("--model", model["id"], "--corpus", corpus["id"], "--sequences", "2", "--length", "16")
    job = running.answer("builds", "create", *asked, "--density", "0.01")
    build = running.answer("builds", "show", job["id"])
    digest = build["package_digest"]
    running.answer("releases", "publish", "tiny-llama", "--package", digest, "--alias", "stable")
    return {
        "model_id": model["id"],
        "corpus_id": corpus["id"],
        "job_id": job["id"],
        "build_id": job["id"],
        "mask_id": build["mask_id"],
        "quantization_id": build["quantization_id"],
        "digest": digest,
        "blob_digest": running.answer("packages", "show", digest)["layers"][0]["digest"],
    }


def _enrol(folder: Path, url: str) -> tuple[str, dict[str, str]]:
    """Enrol a device that reports a run and joins a federation. Return its token and the ids."""
    with running_api(folder, database_url=url) as api:
        device = api.device(release="tiny-llama")
        token, run_id = device.token(), new_run_id()
        answer = api.post("/v1/runs", {"run_id": run_id, "metrics": run_metrics()}, token)
        if answer.status_code != 201:
            raise RuntimeError(f"expected 201, got {answer.status_code}: {answer.text}")
        site = make_site(api, release="tiny-llama")
        answer = api.client.put(f"{site.path}/membership", headers=api.auth(token))
        if answer.status_code != 204:
            raise RuntimeError(f"expected 204, got {answer.status_code}: {answer.text}")
    return token, {"device_id": device.id, "run_id": run_id, "federation_id": site.id}


def main() -> int:
    """Fuzz in a temporary folder. Return 0 if neither pass failed."""
    parser = argparse.ArgumentParser(description="schemathesis against the embedded server")
    parser.add_argument("--examples", type=int, default=200, help="test cases an operation")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="permille-fuzz-") as name:
        folder = Path(name)
        with empty_database(given.database, folder) as url:
            passes = fuzz(folder, url, examples=given.examples, seed=given.seed, workers=given.workers)
    for one in passes:
        sys.stdout.write(f"{one.output}\n{one.name}: exit code {one.returncode}\n")
    return max(one.returncode for one in passes)


if __name__ == "__main__":
    sys.exit(main())
