"""What the evidence consists of, and what its records say of densities."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from permille.errors import InputError
from permille_lab.benchmarks.evidence import STAGES
from permille_lab.benchmarks.evidence_materials import find_materials
from permille_lab.benchmarks.evidence_plan import (
    DENSITY,
    DYNAMIC,
    FRACTIONS,
    QUICK,
    SEGMENTS,
    SWEEP_STAGES,
    Size,
    masked_share,
    size_for,
    units,
)
from permille_lab.benchmarks.evidence_records import by_density, by_scheme, by_steps, flat_density
from permille_lab.benchmarks.evidence_runner import Runner
from permille_lab.evaluate.claims import DECIDING, EQUIVALENCE_SEEDS
from permille_lab.evaluate.outcomes import Json
from permille_lab.evaluate.paper_claims import CLAIMS, Relation
from permille_lab.evaluate.specification import read_sweep


def test_every_sweep_is_one_that_the_product_reads(materials_file: Path, tmp_path: Path) -> None:
    folder = materials_file.parent
    materials = find_materials(materials_file, None, tmp_path)
    size = size_for(folder / "tiny")
    for stage in SWEEP_STAGES:
        for unit in units(stage, folder / "tiny", "sst2", size, density=0.01, fractions=FRACTIONS):
            path = tmp_path / "sweep.toml"
            path.write_text(unit.toml(materials))
            sweep = read_sweep(path)
            assert sweep.density == unit.choices["density"]
            assert sweep.queries * sweep.batch_size == (16 if stage == "queries" else 128)
    assert set(SWEEP_STAGES) < set(STAGES)
    with pytest.raises(InputError, match="expected a stage"):
        units("tables", folder / "tiny", "sst2", size, fractions=())


def test_claims_of_equality_get_the_seeds_that_they_need(materials_file: Path) -> None:
    """Every side that a stage has of such a claim; `zo:full` of `table` stands beside the other densities."""
    model = materials_file.parent / "tiny"
    size = size_for(model)
    seeds: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for stage in DECIDING:
        for unit in units(stage, model, "sst2", size, density=0.1, fractions=()):
            for method in unit.choices["methods"]:
                seeds[stage, unit.choices["bases"][0], method] = unit.choices["seeds"]
    for claim in CLAIMS:
        if claim.relation is not Relation.BETTER:
            for side in (claim.first, claim.second):
                base = "nf4" if side.four_bit else "bf16"
                planned = [found for (_, *rest), found in seeds.items() if rest == [base, side.method]]
                assert planned, side
                assert all(len(found) >= EQUIVALENCE_SEEDS for found in planned), side


@pytest.mark.parametrize("task", ["sst2", "boolq"])
@pytest.mark.parametrize("size", [QUICK, Size(zo_steps=200, fo_steps=1), Size(zo_steps=100, fo_steps=1)])
def test_dynamic_masks_are_evaluated_as_often_as_static_ones(
    size: Size, task: str, materials_file: Path
) -> None:
    model = materials_file.parent / "tiny"
    dynamic = 0
    for stage in SWEEP_STAGES:
        for unit in units(stage, model, task, size, density=0.01, fractions=FRACTIONS):
            if {SEGMENTS, *DYNAMIC} & set(unit.choices["methods"]):
                steps, every = unit.choices["zo_steps"], unit.choices["refresh_steps"]
                segments = len(range(0, steps, every))
                assert (
                    segments * max(1, unit.choices["evaluations"] * every // steps)
                    == (unit.choices["evaluations"])
                )
                assert steps % every == 0
                dynamic += 1
    assert dynamic == 4 + len(FRACTIONS) - 1  # the two smallest densities of this model are one


def test_densities_of_equal_masks_are_measured_once(materials_file: Path) -> None:
    """The tiny model's tensors have 512 to 2,048 weights: of 0.1 % and less each has one or two masked."""
    model = materials_file.parent / "tiny"
    planned = units("fractions", model, "sst2", QUICK, fractions=(1e-5, 1e-2, 1e-4, DENSITY, 1e-1))
    static = [
        unit.choices["density"] for unit in planned if unit.name.startswith("fractions-tiny-sst2-static")
    ]
    assert static == [1e-5, 1e-2, 1e-1]
    assert masked_share(model, 1e-4) == masked_share(model, 1e-5) < masked_share(model, DENSITY)


def test_text_has_the_curve_alone(materials_file: Path) -> None:
    """How many weights are worth training on people's text: no controls, no masks that move."""
    model = materials_file.parent / "tiny"
    planned = units("fractions", model, "text", size_for(model), fractions=FRACTIONS)
    assert [unit.name for unit in planned] == [
        f"fractions-tiny-text-static-{density}" for density in ("0.01", "0.0001", "0.1")
    ]
    methods = ["zo:sensitive-c4", "zo:random", "fo:sensitive-c4"]
    assert all(unit.choices["methods"] == methods for unit in planned)


def test_longer_runs_differ_in_their_length_alone(materials_file: Path, tmp_path: Path) -> None:
    model = materials_file.parent / "tiny"
    planner = Runner(find_materials(materials_file, None, tmp_path), tmp_path).planner
    assert planner.planned("longer", model, "rte") == []
    references, _ = planner.planned("longer", model, "sst2")
    assert references.choices["methods"] == ["zero-shot", "fo:lora-8"]
    assert references.choices["fo_steps"] == references.choices["zo_steps"] == 1000
    masks, others = planner.planned("longer", model, "text")
    assert masks.choices["methods"] == ["zo:sensitive-c4", "zo:random"]
    assert others.choices["methods"] == ["zo:lora-8", "zo:full"]
    (of_table,) = (unit for unit in planner.planned("table", model, "text") if unit.name.endswith("-prefix"))
    own = {"methods", "refresh_steps"}
    differing = {key for key, value in masks.choices.items() if of_table.choices[key] != value} - own
    assert differing == {"zo_steps", "evaluations", "tuning_seeds"}
    assert masks.choices["zo_steps"] == 5 * of_table.choices["zo_steps"] == 1000


def test_tasks_with_passages_take_half_the_steps_and_fewer_items() -> None:
    size = Size(zo_steps=200, fo_steps=101)
    half = size.halved()
    assert (half.zo_steps, half.fo_steps) == (100, 50)
    assert (size.sizes, half.sizes) == ((1000, 128, 400), (1000, 64, 300))
    assert half.equivalence_seeds == half.seeds == size.seeds
    assert min(QUICK.halved().sizes) > 0


def test_a_tensor_has_at_least_one_masked_weight(materials_file: Path) -> None:
    """14 tensors of the tiny model: 0.001% of each is nothing, one is masked."""
    total = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert masked_share(materials_file.parent / "tiny", 1e-5) == 14 / total
    assert masked_share(materials_file.parent / "tiny", 0.5) == 0.5


def fraction_records(losses: Mapping[float, tuple[float, ...]]) -> list[Json]:
    return [
        {
            "stage": "table" if density == DENSITY else "fractions",
            "base": "bf16",
            "model": "m",
            "task": "sst2",
            "method": "zo:sensitive-c4",
            "density": density,
            "seed": seed,
            "validation_loss": loss,
        }
        for density, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]


def test_the_curve_is_flat_from_the_smallest_density_within_an_error_of_the_best() -> None:
    losses = {1e-4: (0.9, 0.95, 0.92), 1e-3: (0.61, 0.59, 0.63), 1e-2: (0.60, 0.60, 0.61)}
    assert flat_density(fraction_records(losses), "m", "sst2") == 1e-3
    assert flat_density(fraction_records({1e-3: (0.9, 0.8), 1e-2: (0.5, 0.4)}), "m", "sst2") == 1e-2
    assert flat_density(fraction_records({1e-3: (0.9,), 1e-2: (0.5,)}), "m", "sst2") is None
    assert flat_density([], "m", "sst2") is None


def test_the_tables_cells_are_those_of_its_density() -> None:
    own = fraction_records({1e-4: (0.9, 0.8)})
    (of_table,) = fraction_records({1e-3: (0.5,)})
    others = [
        of_table | {"seed": 3},
        of_table | {"base": "nf4"},
        of_table | {"method": "zo:full"},
        of_table | {"task": "rte"},
    ]
    assert by_density([*own, of_table, *others]) == [*own, of_table]
    assert by_density([of_table]) == []
    # What an older version measured in the stage at the table's density does not count twice.
    assert by_density([*own, of_table, of_table | {"stage": "fractions"}]) == [*own, of_table]
    table = [of_table, of_table | {"seed": 1}]
    assert flat_density([*own, *table], "m", "sst2") == 1e-3


def test_the_tables_cells_are_those_of_sixteen_bits_and_nf4() -> None:
    (of_table,) = fraction_records({1e-3: (0.5,)})
    nf4 = of_table | {"base": "nf4"}
    own = [of_table | {"stage": "schemes", "base": "squeezellm"}]
    older = [nf4 | {"stage": "schemes"}]  # of a plan that had them in the stage
    others = [nf4 | {"seed": 3}, nf4 | {"method": "fo:lora-8"}, nf4 | {"task": "rte"}, nf4 | {"density": 0.1}]
    assert by_scheme([*older, *own, of_table, nf4, *others]) == [of_table, nf4, *own]
    assert by_scheme([of_table, nf4]) == []


def test_the_tables_cells_are_those_of_the_fewest_steps() -> None:
    (of_table,) = fraction_records({1e-3: (0.5,)})
    longer = of_table | {"stage": "longer"}
    others = [of_table | changed for changed in ({"base": "nf4"}, {"seed": 3}, {"method": "zo:outliers"})]
    assert by_steps([longer, of_table, *others]) == [of_table, longer]
    assert by_steps([of_table]) == []


def test_methods_that_are_compared_have_equal_searches(materials_file: Path) -> None:
    model = materials_file.parent / "tiny"
    assert set(DECIDING) | {claim.stage for claim in CLAIMS} - {None} < set(SWEEP_STAGES)
    for task, expected in (("sst2", 3), ("rte", 1)):
        for stage in SWEEP_STAGES:
            of_stage = units(stage, model, task, size_for(model), density=0.1, fractions=FRACTIONS)
            found = {unit.choices["tuning_seeds"] for unit in of_stage}
            assert found == {1 if stage in ("fractions", "longer") else expected}, stage
