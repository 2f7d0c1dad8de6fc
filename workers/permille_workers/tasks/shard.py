"""The shard job, and how a long mask job is split and joined.

A shard job sums the squared gradients of a part of a mask job's sequences. A long mask job draws its
sequences, stores them for its parts, and adds a shard job for each range that
`permille.sensitivity.scores.shard_ranges` returns. The ranges do not depend on the number of workers, so the
scores do not either. When all shards are done, the next attempt of the mask job adds their sums in the order
of the shards. If a sum was removed after a failure, its shard runs again.
"""

from collections.abc import Mapping
from dataclasses import replace

from permille.errors import InputError
from permille.pipeline.draw import Drawn
from permille.schemas.jobs import JobKind
from permille.schemas.masks import Dtype, FisherMaskCreate, ShardRequest
from permille.sensitivity.scores import Scores, join_shards, put_scores, shard_ranges
from permille.store.jobs import claims
from permille_workers.runtime.context import PartsToAdd, Publish, TaskContext
from permille_workers.tasks.sources import open_model


def run(context: TaskContext, request: ShardRequest) -> Publish:
    """Sum the squared gradients of a shard. The result of the job is the digest of the sums.

    Raises:
        InputError: the job is not part of a mask job, or the model is unusable.
        PackageError: the stored sequences are missing or damaged.
    """
    from permille.pipeline.score import Scoring

    if context.claim.parent_id is None:
        raise InputError("A shard is a part of a mask job and cannot run alone. Request a mask instead.")
    shared = context.shared(context.claim.parent_id)
    drawn = Drawn.stored(shared, request.plan)
    context.progress(0.0, "opening the model")
    model = open_model(context, request.model_id)
    scoring = Scoring(
        checkpoint=model.checkpoint,
        drawn=drawn,
        scope=request.scope,
        compute=replace(context.compute, dtype=request.dtype),
        progress=context.progress,
        work=context.work_folder,
    )
    digest = put_scores(shared, scoring.shard(range(request.first, request.stop)))
    return lambda _session: digest


def drawn_before(context: TaskContext) -> Drawn | None:
    """Return the sequences that an earlier attempt of a split mask job drew, if they still exist."""
    shared = context.shared(context.claim.job_id)
    plans = {plan for plan, *_ in _results(context) if shared.has(plan)}
    return Drawn.stored(shared, plans.pop()) if len(plans) == 1 else None


def split_or_join(context: TaskContext, request: FisherMaskCreate, drawn: Drawn) -> PartsToAdd | Scores:
    """Return the shards that have no sums yet. If all shards have sums, join them and return the scores.

    Raises:
        PackageError: a sum is damaged.
    """
    shared = context.shared(context.claim.job_id)
    plan = drawn.put(shared)
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

    A plan is the digest of the description that `Drawn.put` stores with the sequences.
    """
    with context.db.read() as session:
        found = claims.results_of_parts(session, context.claim)
    asked = [(ShardRequest.model_validate(dict(payload)), digest) for payload, digest in found]
    return {(request.plan, request.first, request.dtype): digest for request, digest in asked}
