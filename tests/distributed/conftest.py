import pytest
import torch.distributed as dist

if dist.is_available():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.distributed.world import WORLD
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def group():
    """A process group of WORLD ranks that communicates with nobody."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()
