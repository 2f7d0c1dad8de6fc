"""A worker's database role can make a model sparse."""

from tests.attacks.test_worker_role import Place, add_inputs, finish, place, server

__all__ = ["place", "server"]


def test_a_sparsification_succeeds(place: Place) -> None:
    model, corpus = add_inputs(place.api)
    sparse = {
        "model_id": model,
        "corpus_id": corpus,
        "name": "sparse",
        "method": "wanda",
        "pattern": "2:4",
        "sequences": 8,
        "length": 16,
        "evaluation_sequences": 0,
    }
    finish(place, "/v1/sparsifications", sparse)
