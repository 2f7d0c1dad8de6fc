"""`permille personalise` as a person types it: killed and run again, and what it says of bad input."""

import json
import os
import resource
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from permille.engines.gguf.export import export_gguf
from permille.engines.light.engine import LightEngine
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.zo.estimators import Batch
from permille_agent.embed import Home, model_values, require_active
from permille_lab.exports.llama_cpp import LlamaCpp
from tests.acceptance.environments import ROOT
from tests.preloaded import Process, run
from tests.running_service import environment, permille
from tests.unit.engines.gguf_packages import exported_package

EXAMPLES = ROOT / "examples"
NOTES = EXAMPLES / "gardener" / "notes.txt"
CORPUS = EXAMPLES / "corpus.jsonl.gz"
COMMAND = (sys.executable, "-m", "permille_service.cli.main", "personalise")
FAILED, USAGE, REFUSED, NOT_WRITTEN, INTERRUPTED = 1, 2, 3, 8, 130
LARGEST_FILE = 600_000
"""More than training writes into a file, and less than the exported model has."""
WAIT_S = 300.0


def _options(folder: Path, name: str) -> list[str]:
    places = ("--out", str(folder / f"{name}.gguf"), "--work", str(folder / name))
    model = ("--folder", str(EXAMPLES / "model"), "--density", "0.005", "--corpus", str(CORPUS))
    return [*COMMAND, *model, "--text", str(NOTES), "--steps", "40", *places]


def _run(options: list[str]) -> subprocess.CompletedProcess[str]:
    return run(options, env=environment())


def _answer(options: list[str]) -> dict[str, Any]:
    done = _run([*options, "--json"])
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that nothing stopped, and its answer."""
    folder = tmp_path_factory.mktemp("personalise")
    return folder, _answer(_options(folder, "whole"))


def _wait_for(folder: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(folder.glob(pattern)):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _living(folder: Path) -> list[int]:
    """Processes whose command line or environment names the folder, apart from this one."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            told = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
            if str(folder).encode() in told and (place / "stat").read_text().split()[2] != "Z":
                found.append(int(place.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def _until_none_lives(folder: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while _living(folder):
        assert time.monotonic() < deadline, _living(folder)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_command_goes_on_to_the_same_model(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    there, once = whole
    assert once["is_new"]
    assert once["loss_personal"] < once["loss_base"]

    options = _options(tmp_path, "killed")
    work = tmp_path / "killed"
    stages = (
        ("build/drawn", signal.SIGKILL, ""),
        ("build/mask", signal.SIGTERM, ""),
        ("device-*/runs/*/descent-0.jsonl", signal.SIGINT, "4 of 5, training. Kept: the package and the"),
        ("device-*/runs/*/outcome.json", signal.SIGKILL, ""),
    )
    for pattern, number, told in stages:
        process = Process(
            options,
            env=environment(),
            text=True,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # A shell's background jobs ignore SIGINT, and what they start inherits that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
        )
        _wait_for(work, pattern, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else INTERRUPTED)
        assert told in said
        if number != signal.SIGKILL:
            assert said.endswith(
                f"To go on, run the same command again: {shlex.join(('permille', *options[3:]))}\n"
            )
        _until_none_lives(work)
    again = _answer(options)

    same = ("run", "is_new", "loss_base", "loss_personal", "general_loss_personal")
    assert {name: again[name] for name in same} == {name: once[name] for name in same}
    assert (tmp_path / "killed.gguf").read_bytes() == (there / "whole.gguf").read_bytes()
    assert Path(again["page"]).is_file()
    assert stat.S_IMODE((tmp_path / "killed.gguf").stat().st_mode) == 0o600
    assert "FROM ./killed.gguf" in (tmp_path / "killed.Modelfile").read_text()
    assert not _living(tmp_path)
    (home,) = work.glob("device-*")
    shown = subprocess.run(
        [sys.executable, "-m", "permille_agent", "--home", str(home), "status"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "personal, run" in shown
    assert "127.0.0.1" not in shown and "waiting" not in shown, "no service will ever take a report"

    (tmp_path / "killed.gguf").unlink()
    assert "has no memory beside its weights" in " ".join(_run(options).stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_text_begins_from_the_base_model(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "whole", tmp_path / "other")
    text = "\n".join(" ".join(reversed(line.split())) for line in NOTES.read_text().splitlines())
    (tmp_path / "other.txt").write_text(text)
    options = _options(tmp_path, "other")
    options[options.index(str(NOTES))] = str(tmp_path / "other.txt")
    options[options.index("40")] = "1"
    # Nothing of so long a step is kept, whatever the text says.
    done = _run([*options, "--rate-scale", "4", "--keep-general", "0"])
    assert done.returncode == FAILED, done.stdout + done.stderr
    assert "nothing is exported" in " ".join(done.stderr.split())
    assert "sensitive weights" not in done.stdout  # the package is used again
    assert not (tmp_path / "other.gguf").exists()
    assert len(list((tmp_path / "other").glob("device-*"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_adapter_beside_the_untouched_file_predicts_as_our_engine(tmp_path: Path) -> None:
    package = exported_package(tmp_path / "blobs", "llama", changes={"intermediate_size": 96})
    export_gguf(package, None, tmp_path / "base", kind="q8_0")
    model = tmp_path / "base/model.gguf"
    before = model.read_bytes()
    options = _options(tmp_path, "mine")
    options[options.index("--folder")] = "--gguf"
    options[options.index(str(EXAMPLES / "model"))] = str(model)
    options[options.index("0.005")] = "0.05"
    answer = _answer([*options, "--format", "lora"])
    assert answer["loss_personal"] < answer["loss_base"]
    assert model.read_bytes() == before
    adapter = Path(answer["out"])
    assert stat.S_IMODE(adapter.stat().st_mode) == 0o600
    assert not adapter.with_suffix(".Modelfile").exists()

    (home,) = (tmp_path / "mine").glob("device-*")
    active = require_active(Home(home))
    package = Package.open(BlobFolder(Home(home).blobs), active.package)
    ids_T = np.random.default_rng(0).integers(3, 320, 40)
    ids_BT = ids_T[None]
    batch = Batch(input_ids_BT=ids_BT, attention_BT=ids_BT >= 0, target_BT=np.arange(40)[None] > 0)
    ours_T = LightEngine(package).token_losses(model_values(Home(home), active, package), batch)
    distances = []
    for lora in (adapter, None):
        with LlamaCpp(model, context=64, lora=lora) as peer:
            theirs_T = -peer.log_probs(ids_T)[np.arange(39), ids_T[1:]]
        distances.append(float(np.abs(theirs_T - ours_T).mean()))
    # llama.cpp rounds activations to 8 bits, so a small distance is left.
    assert distances[0] < 0.1 * distances[1]


def test_bad_input_is_refused_in_plain_words(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out.gguf"), "--work", str(tmp_path / "work"))
    (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04 no model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "little.txt").write_text("A few words are no text.\n")
    (tmp_path / "no.pdf").write_bytes(b"not a page" * 1000)
    (tmp_path / "rows.jsonl").write_text('{"words": "none"}\n')
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x09")
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless/config.json").write_text("{}")
    (tmp_path / "endless/again").symlink_to(tmp_path / "endless")
    text = ("--text", str(NOTES))
    model = ("--folder", str(EXAMPLES / "model"))
    cases = {
        ("--gguf", str(tmp_path / "none.gguf"), *text): "There is no file",
        ("--gguf", str(tmp_path / "not.gguf"), *text): "is no GGUF file",
        ("--folder", str(tmp_path / "empty"), *text): "it has no config.json",
        ("--folder", str(tmp_path / "endless"), *text): "is a link that leads to no file",
        ("--gguf", str(tmp_path / "not.gguf"), "--scheme", "source", *text): "is no GGUF file",
        ("--ollama", "nobody/has:this", *text): "ollama pull",
        (*model, "--text", str(tmp_path / "none.txt")): "There is no file or folder",
        (*model, *text, "--corpus", str(tmp_path / "none.txt")): "There is no file or folder",
        (*model, *text, "--corpus", str(tmp_path)): "must end with one of .jsonl, .jsonl.gz, .txt",
        (*model, *text, "--corpus", str(tmp_path / "rows.jsonl")): "1 no-text-field",
        (*model, "--text", str(tmp_path / "little.txt")): "Your text has 24 bytes",
        (*model, "--text", str(tmp_path / "cut.gguf")): "0 read, 1 skipped: 1 x not .txt, .md,",
        (*model, "--text", str(tmp_path / "no.pdf")): "no.pdf: 1 file: 0 read, 1 skipped: 1 x damaged",
        (*model, "--text", str(tmp_path / "no.pdf"), "--text", str(tmp_path / "little.txt")): (
            "no.pdf: damaged, or no .pdf file"
        ),
        ("--gguf", str(EXAMPLES / "model"), *text): "is a folder. Name it with --folder",
        ("--folder", str(NOTES), *text): "is a file. Name a GGUF file with --gguf",
        ("--gguf", str(tmp_path / "cut.gguf"), *text): "cut.gguf is truncated",
        (*model, *text, "--work", str(NOTES)): "is a file. Name a folder",
        (
            *model,
            *text,
            "--work",
            str(tmp_path / "cut.gguf/w"),
        ): "cannot be used: Not a directory. Name another --work",
        (*model, *text, "--work", "w" * 300): "cannot be used: File name too long. Name another --work",
        (
            *model,
            *text,
            "--work",
            "/proc/w",
        ): "cannot be used: No such file or directory. Name",
        (*model, "--text", str(NOTES.parent), "--work", str(NOTES.parent / "w")): "lies in your text",
        # Training skips hidden folders, so the next check refuses.
        (*model, "--text", str(NOTES.parent), "--work", str(NOTES.parent / ".w"), "--out", str(NOTES)): (
            "exists already"
        ),
    }
    for options, message in cases.items():
        done = permille("personalise", *out, *options)
        assert done.returncode == REFUSED, done.stderr
        assert message in " ".join(done.stderr.split())
    shutil.copytree(NOTES.parent, tmp_path / "mine")
    data, text_around = ("--data-dir", str(tmp_path / "mine/data")), ("--text", str(tmp_path / "mine"))
    done = permille(*data, "personalise", *model, *text_around, *out[:2])
    assert "mine/data/personal lies in your text" in " ".join(done.stderr.split())
    usage = {
        ("--density", "0"): "--density must be 0.000001 to 0.5, got 0.0",
        ("--density", "0.6"): "--density must be 0.000001 to 0.5, got 0.6",
        ("--minutes", "5", "--steps", "5"): "Give either --steps or --minutes",
        ("--minutes", "nan"): "--minutes must be above 0",
        ("--steps", "0"): "--steps must be 1 to",
        ("--rate-scale", "400"): "--rate-scale must be above 0",
        ("--keep-general", "nan"): "--keep-general must be 0 to 100",
        ("--learn", "everyone"): "'everyone' is not one of",
        ("--format", "lora"): "--format lora needs a GGUF file",
        ("--format", "transformers"): "--format transformers writes a folder",
    }
    for options, message in usage.items():
        done = permille("personalise", *model, *text, *options, *out)
        assert done.returncode == USAGE, done.stderr
        assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "work").exists()
    none = permille("personalise", *text, *out)
    assert (none.returncode, "Name one of --gguf" in none.stderr) == (2, True)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_too_little_text_is_refused_and_the_package_is_kept(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(whole[0] / "whole", tmp_path / "little")
    (tmp_path / "little.txt").write_text("A few words are no text.\n" * 60)
    options = _options(tmp_path, "little")
    options[options.index(str(NOTES))] = str(tmp_path / "little.txt")
    done = _run(options)
    assert done.returncode == REFUSED, done.stderr
    assert "There is too little text" in " ".join(done.stdout.split())
    told = _run([*options, "--json"])
    assert "There is too little text" in json.loads(told.stdout)["error"]
    assert not (tmp_path / "little.gguf").exists()

    # If a training is not adopted, the earlier model is written, with its losses and its page.
    again = _options(tmp_path, "little")
    again[again.index("40")] = "1"
    kept = _answer(again)
    once = whole[1]
    assert not kept["is_new"]
    assert {name: kept[name] for name in ("run", "loss_personal")} == {
        name: once[name] for name in ("run", "loss_personal")
    }
    assert once["run"] in kept["page"]
    assert (tmp_path / "little.gguf").read_bytes() == (whole[0] / "whole.gguf").read_bytes()

    other = _options(tmp_path, "other")
    other[other.index(str(tmp_path / "other"))] = str(tmp_path / "little")
    other[other.index("0.005")] = "0.01"
    refused = _run(other)
    assert refused.returncode == REFUSED
    assert "of another model, corpus, density or scheme" in " ".join(refused.stderr.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_cannot_be_written_is_kept_and_written_by_the_command_that_is_named(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(whole[0] / "whole", tmp_path / "full")
    options = _options(tmp_path, "full")
    options[options.index("40")] = "1"
    done = subprocess.run(
        options,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        # The disk refuses the model as a full disk does.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE)),
    )
    assert done.returncode == NOT_WRITTEN, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert f"trained and kept, but {tmp_path / 'full.gguf'} was not written: The disk refused" in said
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".full*"))
    commands = [part.split(" Or for ")[0] for part in said.split("permille-agent ")[1:]]
    assert len(commands) == 2
    for line in commands:
        subprocess.run(
            [sys.executable, "-m", "permille_agent", *shlex.split(line)], check=True, timeout=WAIT_S
        )
    assert (tmp_path / "full-transformers/model.safetensors").is_file()
    assert (tmp_path / "full-gguf/model.gguf").is_file()
