"""The shard job, and how a long mask job is split and joined.

A shard job sums the squared gradients of a part of a mask job's sequences. A long mask job draws its
sequences, stores them for its parts, and adds a shard job for each range that
`permille.sensitivity.scores.shard_ranges` returns. The ranges do not depend on the number of workers, so the
scores do not either. When all shards are done, the next attempt of the mask job adds their sums in the order
of the shards. If a sum was removed after a failure, its shard runs again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from permille.digests import JSON
from permille.errors import InputError
from permille.package.blobs import BlobFolder
from permille.schemas.jobs import JobKind
from permille.schemas.masks import Dtype, FisherMaskCreate, ShardRequest
from permille.sensitivity.scores import Scores, join_shards, put_scores, shard_ranges
from permille.store.jobs import claims
from permille_workers.runtime.context import PartsToAdd, Publish, TaskContext
from permille_workers.tasks.sources import open_model

_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Sequences that were drawn from a corpus, where they come from, and the report on reading the corpus."""

    tokens_NT: NDArray[np.int64]
    provenance: dict[str, JSON]
    read: dict[str, object]


def run(context: TaskContext, request: ShardRequest) -> Publish:
    """Sum the squared gradients of a shard. The result of the job is the digest of the sums.

    Raises:
        InputError: the job is not part of a mask job, or the model is unusable.
        PackageError: the stored sequences are missing or damaged.
    """
    from permille.sensitivity.fisher import shard_sums
    from permille_workers.tasks.compute import open_torch_model

    if context.claim.parent_id is None:
        raise InputError("A shard is a part of a mask job and cannot run alone. Request a mask instead.")
    shared = context.shared(context.claim.parent_id)
    drawn = _load(shared, request.plan)
    context.progress(0.0, "loading the model")
    model = open_model(context, request.model_id)

    sums = shard_sums(
        open_torch_model(context, model.checkpoint, drawn.tokens_NT.shape[1], request.dtype),
        drawn.tokens_NT,
        range(request.first, request.stop),
        request.scope,
        progress=context.part(0.02, 0.99, "fisher"),
        spill_dir=context.work_folder / "scores",
        resume=context.work_folder / "fisher",
    )
    digest = put_scores(shared, sums)
    return lambda _session: digest


def drawn_before(context: TaskContext) -> Drawn | None:
    """Return the sequences that an earlier attempt of a split mask job drew, if they still exist."""
    shared = context.shared(context.claim.job_id)
    plans = {plan for plan, *_ in _results(context) if shared.has(plan)}
    return _load(shared, plans.pop()) if len(plans) == 1 else None


def split_or_join(context: TaskContext, request: FisherMaskCreate, drawn: Drawn) -> PartsToAdd | Scores:
    """Return the shards that have no sums yet. If all shards have sums, join them and return the scores.

    Raises:
        PackageError: a sum is damaged.
    """
    shared = context.shared(context.claim.job_id)
    plan = _store(shared, drawn)
    shards = shard_ranges(len(drawn.tokens_NT))
    dtype = context.settings.dtype
    done = {
        first: digest for (at, first, of), digest in _results(context).items() if (at, of) == (plan, dtype)
    }
    due = [shard for shard in shards if not (shard.start in done and shared.has(done[shard.start]))]
    if due:
        return PartsToAdd([(JobKind.SHARD, _request(request, plan, shard, dtype)) for shard in due])
    for index, shard in enumerate(shards):
        context.progress(0.86 + 0.02 * index / len(shards), f"checking {index + 1}/{len(shards)}")
        shared.check(done[shard.start])
    context.progress(0.88, "joining the shards")
    paths = [shared.path(done[shard.start]) for shard in shards]
    return join_shards(paths, len(drawn.tokens_NT), spill_dir=context.work_folder / "scores")


def _request(request: FisherMaskCreate, plan: str, shard: range, dtype: Dtype) -> ShardRequest:
    return ShardRequest(
        model_id=request.model_id,
        scope=request.scope,
        plan=plan,
        first=shard.start,
        stop=shard.stop,
        dtype=dtype,
    )


def _results(context: TaskContext) -> Mapping[tuple[str, int, str], str]:
    """Return the digest of the newest sums for each plan, first sequence and dtype.

    A plan is the digest of the description that `_store` stores with the sequences.
    """
    with context.db.read() as session:
        found = claims.results_of_parts(session, context.claim)
    asked = [(ShardRequest.model_validate(dict(payload)), digest) for payload, digest in found]
    return {(request.plan, request.first, request.dtype): digest for request, digest in asked}


def _store(shared: BlobFolder, drawn: Drawn) -> str:
    """Store the tokens as little-endian uint32, and a description of them.

    Return the digest of the description.
    """
    described = {
        "shape": list(drawn.tokens_NT.shape),
        "tokens": shared.put_bytes(drawn.tokens_NT.astype("<u4").tobytes()),
        "provenance": drawn.provenance,
        "read": drawn.read,
    }
    return shared.put_bytes(json.dumps(described, sort_keys=True).encode())


def _load(shared: BlobFolder, plan: str) -> Drawn:
    described = json.loads(shared.read(plan, limit=_PLAN_BYTES))
    number, length = described["shape"]
    tokens = np.frombuffer(shared.read(described["tokens"], limit=4 * number * length), "<u4")
    return Drawn(
        tokens_NT=tokens.reshape(number, length).astype(np.int64),
        provenance=described["provenance"],
        read=described["read"],
    )
