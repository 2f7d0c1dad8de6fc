"""One job of the service under test, run in this process."""

from permille.store.jobs import claims
from permille_workers.runtime.child import attempt
from permille_workers.runtime.settings import WorkerSettings
from permille_workers.tasks import TASKS
from tests.api_service import Api


def run_one(api: Api) -> bool:
    """Run the next queued job as the child of a worker does. Return False if there is none."""
    database, settings = api.service.database, api.service.settings
    with database.write() as session:
        claim = claims.claim(session, worker="test", lease_s=600)
    if claim is None:
        return False
    attempt(TASKS, database, claim, WorkerSettings.model_validate({"data_dir": settings.data_dir}))
    return True
