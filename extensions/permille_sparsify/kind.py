"""The kind of job that makes a model sparse."""

from typing import Final

from permille.schemas.jobs import JobKind
from permille.schemas.work import View, WorkKind
from permille_sparsify.schemas import Sparsification, SparsificationCreate

KIND: Final = WorkKind(
    kind=JobKind.SPARSIFICATION,
    request=SparsificationCreate,
    record=Sparsification,
    collection="sparsifications",
    about="Make models sparse, and see what that costs.",
    starts="Set weights of a model to zero, and register the result as a model.",
    shows="Show what a sparsification costs: zeros and error by layer, perplexity before and after.",
    view=View(
        columns=("id", "request.name", "request.method", "model_id", "created_at"),
        example="--model tiny --corpus stories --name tiny-half --rate 0.5",
        then="permille sparsifications report {}",
    ),
    key="sparsification_id",
    prefix="sparse",
)
