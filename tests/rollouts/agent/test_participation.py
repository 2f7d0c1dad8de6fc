"""Tests of a device in a rollout: when it takes the version, what it reports, and when it goes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from permille.errors import OperatorError, PackageError, RetryableError
from permille.package.blobs import BlobFolder
from permille.package.reader import Package
from permille.schemas.releases import Release
from permille.schemas.runs import Outcome
from permille_agent.link import install as install_module
from permille_agent.link import pull as pull_module
from permille_agent.link.api import DeviceApi
from permille_agent.link.enrolment import Enrolment
from permille_agent.link.pull import pull
from permille_agent.link.rounding import rounded_difference
from permille_agent.link.verify import verify
from permille_agent.state.choices import add_references
from permille_agent.state.home import Home, open_home, write_record
from permille_agent.state.models import installed_release, opening
from permille_agent.training.decision import Decision
from permille_rollouts.agent import participation as module
from permille_rollouts.agent.participation import (
    FIRST_PAUSE_S,
    MAX_ATTEMPTS,
    Participation,
    RolloutRecord,
    difference_of,
    finish,
    note_failure,
    read_standing,
)
from permille_rollouts.offer import Choice, Offer, ReportCode, RolloutState, member_digest, place_of
from permille_rollouts.schemas.rollouts import RolloutReport
from permille_rollouts.state_machine import MAX_DIFFERENCE
from permille_rollouts.windows import Window
from tests.bigram_engine import RememberingBigramEngine
from tests.device_service import DeviceService, Fault
from tests.packages import tiny_package
from tests.unit.edge_agent.runs import device_at, user_text

OFFER = Offer(
    rollout="rollout_01jd3kq8z7m4n5p6r7s8t9v0wx",
    version=2,
    state=RolloutState.RUNNING,
    places=10_000,
    choice=Choice(),
    window=None,
)


@pytest.fixture(scope="module")
def second(package: Package) -> Package:
    return tiny_package(package.blobs.root, seed=1)


@dataclass
class Device:
    """An enrolled device with version 1. No alias points to version 2."""

    home: Home
    api: DeviceApi
    enrolment: Enrolment
    service: DeviceService
    now_s: float = 1_800_000_000.0

    def pull(self) -> int:
        return pull(self.home, self.api, self.enrolment, now_s=self.now_s).release.version

    def offer(self, offer: Offer) -> None:
        self.service.offer(offer.to_document())

    @property
    def rollout_reports(self) -> list[dict[str, object]]:
        reports = map(RolloutReport.model_validate, self.service.rollout_reports)
        return [report.model_dump(mode="json", exclude_defaults=True) for report in reports]


@pytest.fixture
def device(
    home: Home,
    api: DeviceApi,
    enrolment: Enrolment,
    service: DeviceService,
    package: Package,
    second: Package,
) -> Device:
    made = Device(home, api, enrolment, service)
    made.pull()
    service.publish(second.digest, 2, alias="canary")
    service.point(package.digest, 1)
    return made


@contextmanager
def trials_fail(code: str) -> Iterator[None]:
    def refuse(_blobs: Path, _digest: str, *, size_bytes: int) -> None:
        raise PackageError(code, f"of {size_bytes} bytes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install_module, "try_package", refuse)
        patch.setattr(pull_module, "try_package", refuse)
        yield


def test_a_device_of_an_open_wave_takes_the_version_and_says_so(device: Device) -> None:
    device.offer(OFFER)
    assert device.pull() == 2
    assert device.rollout_reports == [{}, {"installed": True, "code": "ok"}], "there is no text to train on"
    assert device.pull() == 2
    assert len(device.rollout_reports) == 2, "it is reported once"


def test_a_device_whose_wave_is_closed_keeps_what_it_has(device: Device) -> None:
    place = place_of(OFFER.rollout, device.enrolment.device_id)
    device.offer(replace(OFFER, places=place))
    assert (device.pull(), device.rollout_reports) == (1, [])
    device.offer(replace(OFFER, places=place + 1))
    assert device.pull() == 2


def test_a_device_begins_only_in_a_maintenance_window(device: Device) -> None:
    # A window of an hour that begins 12 hours away is closed now.
    later = (datetime.fromtimestamp(device.now_s, UTC).hour + 12) % 24
    window = Window(cron=f"0 {later} * * *", minutes=60, zone="UTC")
    device.offer(replace(OFFER, window=window))
    assert (device.pull(), device.rollout_reports) == (1, [])
    device.offer(replace(OFFER, window=replace(window, minutes=1440)))
    assert device.pull() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"state": RolloutState.PAUSED},
        {"state": RolloutState.STOPPED},
        {"choice": Choice(engines=("torch",))},
        {"choice": Choice(agent_version="99.0.0")},
        {"choice": Choice(members=(member_digest(OFFER.rollout, "dev_other"),))},
        {"version": 9},
    ],
)
def test_nothing_but_a_running_rollout_to_its_group_makes_it_begin(
    device: Device, change: dict[str, object]
) -> None:
    device.offer(replace(OFFER, **change))  # type: ignore[arg-type]
    assert (device.pull(), device.rollout_reports) == (1, [])


def test_a_halt_leaves_the_version_where_it_is_and_a_revert_takes_it_back(
    device: Device, package: Package, second: Package
) -> None:
    device.offer(OFFER)
    device.pull()
    for state in (RolloutState.PAUSED, RolloutState.STOPPED):
        device.offer(replace(OFFER, state=state))
        assert device.pull() == 2
    assert BlobFolder(device.home.blobs).has(package.digest), "kept until the rollout ends"
    device.service.offer(None)
    device.service.publish(package.digest, 3)
    sent = device.service.blob_bytes_sent
    assert device.pull() == 3
    assert device.service.blob_bytes_sent == sent, "nothing is fetched again"
    assert read_standing(device.home).part is None
    assert not BlobFolder(device.home.blobs).has(second.digest)


def test_the_earlier_package_is_checked_until_the_rollout_ends(device: Device, second: Package) -> None:
    device.offer(OFFER)
    device.pull()
    with opening(device.home, second.digest):
        pass  # after its first use, only the rollout keeps the earlier package
    assert verify(device.home).packages == 2


def test_an_alias_that_moves_while_a_device_polls_is_followed(
    device: Device, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end, a rollout moves the alias to the new version."""
    ask = DeviceApi.release

    def move_first(api: DeviceApi, name: str, alias: str) -> Release:
        monkeypatch.setattr(DeviceApi, "release", ask)
        device.service.publish(package.digest, 3)
        return ask(api, name, alias)

    monkeypatch.setattr(DeviceApi, "release", move_first)
    assert device.pull() == 3


def test_an_older_halt_or_wave_is_not_believed_again(device: Device) -> None:
    device.offer(OFFER)
    older = dict(device.service.metadata)
    device.offer(replace(OFFER, state=RolloutState.STOPPED))
    device.pull()
    device.service.metadata = older
    with pytest.raises(PackageError) as refused:
        device.pull()
    assert refused.value.code == "trust-rollback"
    assert installed_release(device.home).version == 1  # type: ignore[union-attr]


def test_a_wave_that_somebody_opened_on_the_way_is_refused(device: Device) -> None:
    device.offer(replace(OFFER, places=0))
    file = max(name for name in device.service.metadata if name.endswith(".rollouts.json"))
    forged = device.service.metadata[file].replace(b'"places":0', b'"places":10000')
    assert forged != device.service.metadata[file]
    device.service.metadata[file] = forged
    with pytest.raises(PackageError) as refused:
        device.pull()
    assert refused.value.code == "trust-signature"


def test_failures_are_tried_again_later_and_end_with_the_version_of_before(device: Device) -> None:
    device.offer(OFFER)
    with trials_fail("package-trial"):
        for attempt in range(MAX_ATTEMPTS):
            with pytest.raises(PackageError):
                device.pull()
            assert device.pull() == 1, "it waits"
            device.now_s += FIRST_PAUSE_S * 2**attempt + 1
    assert device.rollout_reports == [{}, {"code": "crash", "damage": "package-trial"}]
    assert (device.pull(), len(device.rollout_reports)) == (1, 2)


@pytest.mark.parametrize("jump_s", [-3600, 3600, -31_536_000])
def test_a_clock_that_jumps_delays_the_next_attempt_by_an_hour_at_most(device: Device, jump_s: int) -> None:
    device.offer(OFFER)
    with trials_fail("package-trial"), pytest.raises(PackageError):
        device.pull()
    device.now_s += jump_s + FIRST_PAUSE_S + 3601
    assert device.pull() == 2


@pytest.mark.parametrize(
    ("code", "word"), [("package-trial", "crash"), ("blob-digest", "integrity"), ("layer-role", "refused")]
)
def test_a_failure_has_its_class(device: Device, code: str, word: str) -> None:
    device.offer(OFFER)
    device.service.faults.append(Fault(path="/blobs/", times=99, status=503))
    with pytest.raises(RetryableError):
        device.pull()
    part = read_standing(device.home).part
    assert part is not None and part.attempts == 0, "a network that fails is no fault of the version"
    for _ in range(MAX_ATTEMPTS):
        note_failure(device.home, PackageError(code, "x"), now_s=device.now_s)
    part = read_standing(device.home).part
    assert part is not None and part.code == ReportCode(word)
    note_failure(device.home, OperatorError("x"), now_s=device.now_s)
    assert read_standing(device.home).part == part, "it has ended"


def test_a_report_that_did_not_arrive_goes_with_the_next_poll(device: Device) -> None:
    device.offer(OFFER)
    device.service.faults.append(Fault(path="/rollouts/", times=99, status=503))
    with pytest.raises(RetryableError):
        device.pull()
    assert installed_release(device.home).version == 1, "it begins once the service knows"  # type: ignore[union-attr]
    device.service.faults.clear()
    assert device.pull() == 2
    finish(device.home, ReportCode.OK)
    assert device.rollout_reports[-1] == {"installed": True, "code": "ok"}


def test_a_wave_that_the_service_closed_meanwhile_ends_the_part(device: Device) -> None:
    device.offer(OFFER)
    device.service.faults.append(Fault(path="/rollouts/", times=1, status=409))
    assert device.pull() == 1
    assert read_standing(device.home).part is None


def test_the_owner_may_tell_one_bit_in_place_of_the_number(device: Device, tmp_path: Path) -> None:
    device.offer(OFFER)
    add_references(device.home, [user_text(tmp_path, 3)])
    device.home.policy.write_text('report_loss = "bit"\n')
    assert device.pull() == 2
    assert device.rollout_reports[-1] == {"installed": True}, "training is to come"
    finish(device.home, ReportCode.OK, 0.4)
    device.pull()
    assert device.rollout_reports[-1] == {"installed": True, "code": "ok", "worse": True}
    device.home.policy.unlink()
    part = read_standing(device.home).part
    assert part is not None and part.difference == 0.25, "it is clipped"


def test_facts_are_told_once(device: Device) -> None:
    device.pull()
    (facts,) = device.service.facts
    assert facts["engine"] is None and facts["memory_bytes"] % (1 << 30) == 0
    device.home.policy.write_text('tags = ["canary"]\n')
    device.pull()
    device.pull()
    assert [facts["tags"] for facts in device.service.facts] == [[], ["canary"]]


def test_the_retrained_model_is_compared_with_the_one_before(tmp_path: Path) -> None:
    """The difference is between the losses of both models on the same test text."""
    device = device_at(tmp_path / "device", user_text(tmp_path))
    first = device.train()
    assert first.outcome in (Outcome.ADOPTED, Outcome.KEPT_BASE)
    before = installed_release(device.home)
    losses = module._losses_of(module._newest_run(device.home, before.manifest_digest))  # type: ignore[union-attr]
    assert losses is not None
    device.install(2, seed=1)
    device.train()
    after = installed_release(device.home)
    run = module._newest_run(device.home, after.manifest_digest)  # type: ignore[union-attr]
    part = module.Participation(rollout="r", version=2, before=before, losses=losses)
    assert run is not None
    difference = difference_of(run, part)
    assert difference is not None and abs(difference) < 1.0
    decision = run.load("decision", Decision)
    assert decision is not None
    if decision.against_active is not None:
        assert difference == -decision.against_active.improvement
    assert difference_of(run, replace(part, before=None)) is None


@pytest.mark.parametrize("memories", [(512, 512), (512, 0), (0, 512)])
def test_no_difference_is_measured_with_a_memory(tmp_path: Path, memories: tuple[int, int]) -> None:
    """A report has the losses of the states alone, which a memory of the text would hide."""
    device = device_at(tmp_path / "device", user_text(tmp_path))
    first = device.train(engine_of=RememberingBigramEngine, steps=2, memory=memories[0]).decision
    before = installed_release(device.home)
    losses = module._losses_of(module._newest_run(device.home, before.manifest_digest))  # type: ignore[union-attr]
    assert first is not None and losses is not None
    assert losses.per_token in (first.loss_state, first.loss_base)
    second = device.install(2, seed=1)
    found = device.train(engine_of=RememberingBigramEngine, steps=2, memory=memories[1]).decision
    assert found is not None and found.loss_base is not None and found.loss_state is not None
    assert found.state_against_base is not None
    run = module._newest_run(device.home, second.digest)
    part = module.Participation(rollout="r", version=2, before=before, losses=losses)
    assert run is not None
    own = found.loss_state if found.state_against_base.better else found.loss_base
    # Both packages have one tokenizer, so losses per byte and per token have the same difference.
    assert difference_of(run, part) == pytest.approx(own - losses.per_token)


@pytest.mark.attack(2, "have a rollout signed that is none")
def test_a_signed_rollout_that_is_malformed_is_refused(device: Device) -> None:
    malformed: tuple[dict[str, object], ...] = (
        {},
        {"rollout": 1},
        {"rollout": "r", "version": 2, "state": "running", "places": 100_000},
    )
    before = installed_release(device.home)
    for record in malformed:
        device.service.offer(record)
        with pytest.raises(PackageError) as refused:
            device.pull()
        assert refused.value.code == "rollout-malformed"
        assert installed_release(device.home) == before


@pytest.mark.attack(23, "exact numbers of a rollout confirm a guess of a text")
def test_the_difference_of_a_rollout_is_rounded_and_its_mean_stays(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    for exact in (0.0123456, -0.0123456, 5.0):
        part = Participation(rollout="r", version=2, before=None, losses=None, installed=True)
        write_record(home.rollout, RolloutRecord(part=part))
        finish(home, ReportCode.OK, exact)
        found = read_standing(home).part
        assert found is not None and found.difference is not None
        assert found.difference == round(found.difference, 2)
        assert abs(found.difference) <= MAX_DIFFERENCE
    drawn = [rounded_difference(0.0123, part / 1000) for part in range(1000)]
    assert sum(drawn) / 1000 == pytest.approx(0.0123)
