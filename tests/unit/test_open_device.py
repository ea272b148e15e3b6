import pytest

torch = pytest.importorskip("torch")

from steplab.errors import Unsupported, UserError  # noqa: E402
from steplab.measurement.machine import device as opening  # noqa: E402
from steplab.measurement.machine import world  # noqa: E402
from steplab.measurement.machine.device import CudaDevice, Device, open_device  # noqa: E402
from steplab.measurement.machine.torchrun import ProcessPlace  # noqa: E402


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return current


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_is_opened_by_its_number(two_gpus: list[int], name: str, number: int) -> None:
    found = open_device(name)
    assert isinstance(found, CudaDevice)
    assert found.torch_device == torch.device("cuda", number)
    assert two_gpus == [number]


@pytest.mark.usefixtures("two_gpus")
def test_beside_gpus_the_cpu_is_opened_only_by_name() -> None:
    assert isinstance(open_device("cpu"), Device)
    for missing, named in (("cuda:2", "cuda:2"), ("mps", "mps")):
        with pytest.raises(Unsupported) as refused:
            open_device(missing)
        assert str(refused.value) == (
            f"device {named} is not supported: this machine has cuda:0, cuda:1, cpu; use --device cuda:0"
        )


@pytest.mark.usefixtures("mac")
def test_a_metal_gpu_goes_before_the_cpu() -> None:
    assert open_device("auto").torch_device == open_device("mps").torch_device == torch.device("mps")
    with pytest.raises(Unsupported, match="this machine has mps, cpu; use --device mps"):
        open_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "zzz", "meta", "", "xpu", "cuda:", "cuda:-1", "cpu:0", "auto:0", "CPU"])
def test_what_is_not_known_is_no_device(name: str) -> None:
    with pytest.raises(UserError) as refused:
        open_device(name)
    assert str(refused.value) == (
        f"device '{name}' is not known; choose one of auto, cpu, mps, cuda or cuda:N; "
        f"this machine has {', '.join(opening._devices_here())}"
    )


@pytest.mark.parametrize("name", ["zzz", "mps", "cuda:1", ""])
def test_a_rank_has_no_share_of_what_is_not_known(name: str) -> None:
    place = ProcessPlace(rank=0, size=2, local_rank=0, local_size=2)
    with pytest.raises(UserError, match=f"device '{name}' cannot be shared by several processes"):
        world.join_world(place, name, lambda: pytest.fail("it met the others"))
