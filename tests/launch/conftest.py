import pytest

from tests.launch.bench import Bench


@pytest.fixture
def bench(tmp_path):
    """A folder for a sweep, and the command line."""
    return Bench(tmp_path)
