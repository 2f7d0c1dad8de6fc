"""Tests of Fisher scores: against an independent autograd reference, and rules of memory and resumption."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from permille.errors import InputError
from permille.models.checkpoint import Checkpoint
from permille.models.families import scoped_tensors
from permille.models.layerwise import LayerStream
from permille.sensitivity import fisher
from permille.sensitivity.fisher import add_shard, fisher_scores, scope_shapes, shard_sums
from permille.sensitivity.scores import PartialSums, join_shards, save_scores, shard_ranges, zero_scores
from permille.sensitivity.streamed import StreamedModel

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 24, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8, "max_position_embeddings": 32, "dropout": 0.5},
    "gpt_neox": {"intermediate_size": 24, "hidden_dropout": 0.5},
}


def tiny(family: str = "llama") -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, pad_token_id=0, **sizes, **FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def sequences(n: int = 5, length: int = 9) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(1, 40, (n, length))


def reference(
    model: Any, sequences_NT: NDArray[np.int64], names: list[str]
) -> dict[str, NDArray[np.float64]]:
    """Return the mean over sequences of transformers' squared loss gradient, in float64, without hooks."""
    parameters = [model.get_parameter(name) for name in names]
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for tokens_T in sequences_NT:
        ids_BT = torch.from_numpy(tokens_T)[None]
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient.double() ** 2
    return {name: (total / len(sequences_NT)).numpy() for name, total in zip(names, sums, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_mean_of_squared_gradients_of_single_sequences(family: str) -> None:
    model = tiny(family)
    model.train()  # dropout must not affect the scores, and the reference runs without it
    scores = fisher_scores(model, sequences())
    model.eval()
    expected = reference(model, sequences(), list(scores))
    assert list(scores) == [name for name, _ in scoped_tensors(model.config.to_dict())]
    for name, values in scores.items():
        np.testing.assert_allclose(values, expected[name], rtol=2e-4, atol=1e-12)


def test_scores_of_a_bf16_model_are_summed_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    sums = torch.zeros(2, 3)
    add_square = fisher._square_hook("a", sums, 0)
    for _ in range(300):  # a bf16 sum of equal terms stops at 256 terms
        parameter.grad = torch.ones_like(parameter)
        add_square(parameter)
    assert parameter.grad is None
    assert (sums == 300).all()
    scores = fisher_scores(tiny().to(torch.bfloat16), sequences(1))
    assert scores.flat.dtype == np.float32
    np.testing.assert_allclose(scores.flat, fisher_scores(tiny(), sequences(1)).flat, rtol=1, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu"] + (["cuda"] if torch.cuda.is_available() else []))
def test_sums_that_stay_on_the_device_are_those_of_memory(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fisher_scores(tiny(), sequences())
    monkeypatch.setattr(fisher, "_holds_sums", lambda *_: True)
    found = fisher_scores(tiny().to(device), sequences())
    np.testing.assert_allclose(found.flat, expected.flat, rtol=0 if device == "cpu" else 1e-3, atol=1e-10)


def test_only_the_layers_in_scope_are_scored_and_equal_those_of_the_whole() -> None:
    model = tiny()
    upper = fisher_scores(model, sequences(), "layers:2-")
    assert list(upper) == [name for name in fisher_scores(model, sequences()) if ".layers.2." in name]
    everything = fisher_scores(model, sequences())
    for name, values in upper.items():
        np.testing.assert_allclose(values, everything[name], rtol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    model.train()
    model.model.norm.weight.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    fisher_scores(model, sequences(1))
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name][0])
        assert parameter.requires_grad == before[name][1]
    assert not any("forward" in vars(module) for module in model.modules())


def test_no_two_gradients_live_at_once_and_no_block_keeps_its_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    alive: list[int] = []
    make_hook = fisher._square_hook

    def watching(name: str, sums: Any, sequence: int) -> Any:
        hook = make_hook(name, sums, sequence)

        def watch(parameter: torch.Tensor) -> None:
            alive.append(sum(p.grad is not None for p in model.parameters()))
            hook(parameter)

        return watch

    monkeypatch.setattr(fisher, "_square_hook", watching)
    runs: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    fisher_scores(model, sequences(2))
    assert alive == [1] * (2 * 3 * 7)
    assert len(runs) == 4  # for each sequence, once forward and once again in the backward pass


def test_spilled_scores_are_a_mapped_file_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    monkeypatch.setattr("permille.sensitivity.scores.IN_MEMORY_BYTES", 100)
    spilled = fisher_scores(model, sequences(), spill_dir=tmp_path / "spill")
    assert isinstance(spilled.flat, np.memmap)
    assert spilled.flat.tobytes() == fisher_scores(model, sequences()).flat.tobytes()
    assert list((tmp_path / "spill").iterdir()) == []


def test_shards_are_ranges_of_sixteen_and_at_most_sixty_four_of_them() -> None:
    assert shard_ranges(35) == [range(16), range(16, 32), range(32, 35)]
    assert shard_ranges(16) == [range(16)]
    assert (len(shard_ranges(1024)), len(shard_ranges(1025))) == (64, 33)
    assert len(shard_ranges(100_000)) <= 64
    assert sum(map(len, shard_ranges(100_000))) == 100_000
    with pytest.raises(InputError, match="at least 1 sequence"):
        shard_ranges(0)


@pytest.mark.parametrize("n", [16, 37])
def test_workers_with_a_shard_each_get_the_bits_of_one_process(n: int, tmp_path: Path) -> None:
    model, tokens_NT = tiny(), sequences(n)
    shards = shard_ranges(n)
    for shard in reversed(shards):  # finished in another order
        save_scores(tmp_path / f"{shard.start}", shard_sums(model, tokens_NT, shard))
    total = join_shards([tmp_path / f"{shard.start}" for shard in shards], n)
    assert total.flat.tobytes() == fisher_scores(model, tokens_NT).flat.tobytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", ["all", "layers:1-"])
def test_a_model_that_is_streamed_layer_by_layer_has_the_same_bits(
    family: str, scope: str, tmp_path: Path
) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    stream = LayerStream(Checkpoint(tmp_path))
    two_a_pass = StreamedModel(stream=stream, hidden_bytes=2 * 4 * 9 * 16 * (3 + 2))
    assert two_a_pass.sequences_a_pass(9) == 2
    seen: list[int] = []
    scores = fisher_scores(two_a_pass, sequences(), scope, progress=lambda done, total: seen.append(done))
    assert (seen[-1], sorted(seen)) == (5, seen)
    assert scores.flat.tobytes() == fisher_scores(model, sequences(), scope).flat.tobytes()


class StopError(Exception):
    """Error that a cancelled job's progress raises."""


def test_a_cancelled_job_goes_on_after_its_last_whole_shard_with_the_same_bits(tmp_path: Path) -> None:
    model, tokens_NT = tiny(), sequences(40)

    def stop_at_36(done: int, total: int) -> None:
        assert total == 40
        if done == 36:
            raise StopError

    with pytest.raises(StopError):
        fisher_scores(model, tokens_NT, progress=stop_at_36, resume=tmp_path)
    seen: list[int] = []
    resumed = fisher_scores(model, tokens_NT, progress=lambda done, total: seen.append(done), resume=tmp_path)
    assert seen == list(range(33, 41))
    assert resumed.flat.tobytes() == fisher_scores(model, tokens_NT).flat.tobytes()
    assert len(list(tmp_path.iterdir())) == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def stop_at(last: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done == last:
            raise StopError

    return progress


@pytest.mark.parametrize("n", [12, 40])  # one shard, and three
def test_a_slow_job_goes_on_within_a_shard_with_the_same_bits(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens_NT = tiny(), sequences(n)
    monkeypatch.setattr(fisher, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(fisher, "_SAVING_SHARE", 0)
    with pytest.raises(StopError):
        fisher_scores(model, tokens_NT, progress=stop_at(n - 2), resume=tmp_path)
    seen: list[int] = []
    resumed = fisher_scores(model, tokens_NT, progress=lambda done, total: seen.append(done), resume=tmp_path)
    assert seen == list(range(n - 2, n + 1))
    assert resumed.flat.tobytes() == fisher_scores(model, tokens_NT).flat.tobytes()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_fast_job_saves_no_sum_within_a_shard(tmp_path: Path) -> None:
    with pytest.raises(StopError):
        fisher_scores(tiny(), sequences(), progress=stop_at(4), resume=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on_the_device", [False, True])
def test_a_slow_shard_goes_on_with_the_same_bits(
    on_the_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens_NT = tiny(), sequences(50)
    monkeypatch.setattr(fisher, "_holds_sums", lambda *_: on_the_device)
    sums = zero_scores(scope_shapes(model, "all"))
    add_shard(model, tokens_NT[8:50], sums)
    monkeypatch.setattr(fisher, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(fisher, "_SAVING_SHARE", 0)
    with pytest.raises(StopError):
        shard_sums(model, tokens_NT, range(8, 50), progress=stop_at(39), resume=tmp_path)
    seen: list[int] = []
    again = shard_sums(
        model, tokens_NT, range(8, 50), progress=lambda done, total: seen.append(done), resume=tmp_path
    )
    assert seen == list(range(39, 43))
    assert again.flat.tobytes() == sums.flat.tobytes()


def test_a_slow_streamed_model_saves_its_sums_after_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    stream = LayerStream(Checkpoint(tmp_path / "model"))
    two_a_pass = StreamedModel(stream=stream, hidden_bytes=2 * 4 * 9 * 16 * (3 + 2))
    monkeypatch.setattr(fisher, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(fisher, "_SAVING_SHARE", 0)
    with pytest.raises(StopError):
        fisher_scores(two_a_pass, sequences(), progress=stop_at(4), resume=tmp_path / "sums")
    seen: list[int] = []
    scores = fisher_scores(
        two_a_pass, sequences(), progress=lambda done, total: seen.append(done), resume=tmp_path / "sums"
    )
    assert (min(seen), max(seen)) == (2, 5)  # a pass tells its progress after each layer
    assert scores.flat.tobytes() == fisher_scores(model, sequences()).flat.tobytes()


def test_sums_of_other_sequences_weights_or_scopes_are_not_resumed(tmp_path: Path) -> None:
    model = tiny()
    fisher_scores(model, sequences(3), resume=tmp_path)
    other = sequences(3)
    other[0, 0] += 1 if other[0, 0] < 39 else -1
    with torch.no_grad():
        changed = tiny()
        changed.model.norm.weight[0] += 1
    others: list[tuple[Any, NDArray[np.int64], str]] = [
        (model, other, "all"),
        (changed, sequences(3), "all"),
        (model, sequences(3), "layers:1"),
    ]
    for number, (source, tokens_NT, scope) in enumerate(others, start=2):
        fisher_scores(source, tokens_NT, scope, resume=tmp_path)
        assert len(list(tmp_path.iterdir())) == number


def test_nan_in_the_model_is_refused_with_the_tensors_name() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has weights that are NaN"):
        fisher_scores(model, sequences())


def test_a_loss_that_is_not_finite_is_refused_with_the_sequences_number() -> None:
    model, tokens_NT = tiny(), sequences()
    tokens_NT[tokens_NT == 7] = 8
    tokens_NT[3, 2] = 7
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = 3e38  # finite, but its square overflows in the norm
    model.model.norm.register_forward_hook(
        lambda _, args, out: out + torch.where(args[0] > 1e38, torch.inf, 0)
    )
    with pytest.raises(InputError, match="The loss of sequence 3 is not finite"):
        fisher_scores(model, tokens_NT)


def test_a_gradient_whose_square_overflows_is_refused_with_tensor_and_sequence() -> None:
    model = tiny()
    model.get_parameter("model.layers.2.mlp.down_proj.weight").register_hook(lambda gradient: gradient * 1e30)
    with pytest.raises(InputError, match=r"down_proj\.weight are not finite at sequence 0"):
        fisher_scores(model, sequences())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("tokens_NT", [np.full((1, 5), 40), np.full((1, 5), -1), np.ones((1, 1), np.int64)])
def test_tokens_that_the_model_cannot_take_are_refused(tokens_NT: NDArray[np.int64]) -> None:
    with pytest.raises(InputError, match=r"expected|model's own tokenizer"):
        fisher_scores(tiny(), tokens_NT)


def test_a_sum_of_shards_is_not_taken_for_one_of_sequences(tmp_path: Path) -> None:
    model, tokens_NT = tiny(), sequences()
    fisher_scores(model, tokens_NT, resume=tmp_path)
    whole = range(len(tokens_NT))
    alone = shard_sums(model, tokens_NT, whole)
    assert shard_sums(model, tokens_NT, whole, resume=tmp_path).flat.tobytes() == alone.flat.tobytes()


def test_a_full_disk_ends_no_scoring_within_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fisher, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(PartialSums, "save", full)
    model, tokens_NT = tiny(), sequences()
    found = shard_sums(model, tokens_NT, range(len(tokens_NT)), resume=tmp_path)
    assert found.flat.tobytes() == shard_sums(model, tokens_NT, range(len(tokens_NT))).flat.tobytes()
