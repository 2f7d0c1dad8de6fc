"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """Take what is there to stay out of the collector's sight: modules and tests are millions of objects, and
    a library that collects after each of its steps would walk them all.
    """
    gc.collect()
    gc.freeze()
