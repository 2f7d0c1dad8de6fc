"""Tests of pruning a model folder layer by layer: changed and unchanged weights, kills and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from permille.errors import InputError
from permille.models.checkpoint import INDEX_FILE, Checkpoint
from permille.models.families import scoped_tensors
from permille.models.loading import load_model
from permille.quantization.perplexity import perplexity
from permille_sparsify.plan import Pattern, PruningMethod, PruningPlan
from permille_sparsify.streaming import PruningReport, PruningText, prune_model
from tests.packages import TINY_LLAMA
from tests.tiny_model import write_model

_CONFIG = TINY_LLAMA | {"num_hidden_layers": 3}
_TEXT = PruningText(
    calibration_NT=np.random.default_rng(0).integers(0, 320, (6, 24)),
    evaluation_ET=np.random.default_rng(1).integers(0, 320, (2, 24)),
)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("method", PruningMethod)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_but_the_pruned_weights_stay_bit_for_bit(
    tmp_path: Path, method: PruningMethod, dtype: torch.dtype
) -> None:
    source = _in_shards(write_model(tmp_path / "source", config=_CONFIG), dtype)
    report = prune_model(source, tmp_path / "target", _TEXT, _plan(method))
    target = Checkpoint(tmp_path / "target")
    assert sorted(path.name for path in target.folder.iterdir()) == sorted(source.files())
    linears = dict(scoped_tensors(_CONFIG))
    for name in source.names:
        before, after = source.raw(name), target.raw(name)
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        if name not in linears:
            assert bytes(before.data) == bytes(after.data)
            continue
        values = after.float32()
        assert abs((values == 0).mean() - 0.5) < 0.02 and not np.signbit(values[values == 0]).any()
        if method is not PruningMethod.SPARSEGPT:
            assert (values[values != 0] == before.float32()[values != 0]).all()
    assert [row.name for row in report.linears] == list(linears)
    assert all(0 < row.error < row.norm for row in report.linears)
    assert report.rate == pytest.approx(0.5, abs=0.02)
    again = prune_model(source, tmp_path / "again", _TEXT, _plan(method))
    assert again == report and Checkpoint(tmp_path / "again").digest() == target.digest()


def test_a_layer_is_judged_by_what_the_pruned_layers_before_it_give(tmp_path: Path) -> None:
    source = Checkpoint(write_model(tmp_path / "source", config=_CONFIG))
    rates = {0: 0.7, 1: 0.5, 2: 0.25}
    plan = PruningPlan(method=PruningMethod.WANDA, rates=rates)
    report = prune_model(source, tmp_path / "target", _TEXT, plan)
    model = load_model(tmp_path / "target")
    name = "model.layers.2.self_attn.q_proj"
    inputs: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    with torch.no_grad():
        for tokens_T in torch.from_numpy(_TEXT.calibration_NT):
            model(input_ids=tokens_T[None])
    norm_K = torch.cat([x[0] for x in inputs]).double().norm(dim=0).numpy()
    weight_NK = source.float32(f"{name}.weight")
    order_NK = np.argsort(np.abs(weight_NK) * norm_K, axis=1)[:, : int(32 * rates[2])]
    zeros_NK = model.get_submodule(name).weight.detach().numpy() == 0
    assert np.take_along_axis(zeros_NK, order_NK, axis=1).all() and zeros_NK.sum() == order_NK.size
    assert {row.name: row.zeros / row.weights for row in report.linears}[f"{name}.weight"] == 0.25
    assert _TEXT.evaluation_ET is not None
    for loss, folder in ((report.loss_before, "source"), (report.loss_after, "target")):
        assert loss == pytest.approx(perplexity(load_model(tmp_path / folder), _TEXT.evaluation_ET)["loss"])


@pytest.mark.parametrize("stop_at", [0, 1, 2])
def test_a_call_that_was_stopped_goes_on_after_its_last_layer(tmp_path: Path, stop_at: int) -> None:
    source = Checkpoint(write_model(tmp_path / "source", config=_CONFIG))
    plan = _plan(PruningMethod.SPARSEGPT, Pattern(kept=2, of=4))
    whole = prune_model(source, tmp_path / "whole", _TEXT, plan)
    seen: list[int] = []

    def stop(done: int, _total: int) -> None:
        if done == stop_at:
            raise _KilledError

    work = tmp_path / "work"
    with pytest.raises(_KilledError):
        prune_model(source, tmp_path / "target", _TEXT, plan, progress=stop, resume=work)
    found = prune_model(
        source, tmp_path / "target", _TEXT, plan, progress=lambda i, _: seen.append(i), resume=work
    )
    assert seen == list(range(stop_at, 4))
    assert found == whole
    assert Checkpoint(tmp_path / "target").digest() == Checkpoint(tmp_path / "whole").digest()
    other = PruningPlan(method=PruningMethod.WANDA, rates=0.25)  # another plan does not resume there
    assert prune_model(source, tmp_path / "target", _TEXT, other, resume=work).rate == pytest.approx(
        0.25, abs=0.02
    )


@pytest.mark.parametrize("pattern", [None, Pattern(kept=2, of=4)])
def test_a_model_that_is_as_sparse_already_is_refused(tmp_path: Path, pattern: Pattern | None) -> None:
    source = Checkpoint(write_model(tmp_path / "source", config=_CONFIG))
    plan = _plan(PruningMethod.WANDA, pattern)
    prune_model(source, tmp_path / "sparse", _TEXT, plan)
    with pytest.raises(InputError, match="has these zeros already"):
        prune_model(Checkpoint(tmp_path / "sparse"), tmp_path / "again", _TEXT, plan)
    assert not (tmp_path / "again").exists()
    more: PruningReport = prune_model(
        Checkpoint(tmp_path / "sparse"), tmp_path / "more", _TEXT, _plan(PruningMethod.WANDA, rate=0.75)
    )
    assert more.rate == pytest.approx(0.75, abs=0.02)


def test_a_weight_that_is_no_number_is_refused_with_its_name(tmp_path: Path) -> None:
    name, folder = "model.layers.1.mlp.up_proj.weight", write_model(tmp_path / "source", config=_CONFIG)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} has weights"):
        prune_model(Checkpoint(folder), tmp_path / "target", _TEXT, _plan(PruningMethod.WANDA))


def _plan(method: PruningMethod, pattern: Pattern | None = None, rate: float = 0.5) -> PruningPlan:
    return PruningPlan(method=method, rates=rate, pattern=pattern)


def _in_shards(folder: Path, dtype: torch.dtype) -> Checkpoint:
    """Write the same model in two files."""
    import json

    tensors = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    half = len(names) // 2
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return Checkpoint(folder)
