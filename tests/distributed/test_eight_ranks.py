import pytest
from tests.distributed import modules
from tests.distributed.parity import TINY_MB, assert_trains_alike
from tests.distributed.ranks import on_ranks
from tests.distributed.test_peer_copies import awkward_loss, several_late_passes_of_an_awkward_module
from tests.distributed.test_to_owners import tied_unused_and_rank_dependent_parameters_train_as_without_sharding
from tests.distributed.transports import Delays

from steplab.parallel.collectives import GroupCollectives


def several_passes_with_delays_around_collectives() -> None:
    assert_trains_alike(
        modules.Awkward(), loss=awkward_loss, tolerance=1e-5, steps=2, silent_passes=(False, True, False),
        bucket_size_mb=TINY_MB, group=Delays(GroupCollectives(), longest_s=0.002),
    )  # fmt: skip


CASES = (
    several_passes_with_delays_around_collectives,
    several_late_passes_of_an_awkward_module,
    tied_unused_and_rank_dependent_parameters_train_as_without_sharding,
)


@pytest.mark.release
def test_eight_ranks(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(msg=case.__name__):
            on_ranks(8, case)
