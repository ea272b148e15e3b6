import dataclasses
import math
import re
import tomllib
from importlib import resources
from typing import Any

import pytest
from tests.sure import sure

from steplab.errors import UserError
from steplab.specs.hardware import HardwareSpec, catalogue, find_hardware, hardware_named, parse_catalogue
from steplab.units import GIB, MIB

DATA_CENTRE = (
    "H200 SXM", "H200 NVL", "H100 SXM", "H100 PCIe", "H100 NVL", "B200", "GB200", "A100 SXM 40GB",
    "A100 PCIe 40GB", "A100 SXM 80GB", "A100 PCIe 80GB", "L40S", "MI300X", "H20", "GH200", "B300", "RTX A6000",
)  # fmt: skip
GEFORCE = ("RTX 3090", "RTX 4090", "RTX 5070 Ti", "RTX 5090")


def peak(name: str, dtype: str) -> float:
    found = sure(hardware_named(name).peak_flops(dtype))
    return found.flops_per_s


# Peak = SMs x dense FLOPs per SM per clock x boost clock, a multiply-add being two FLOPs. SM counts, clocks
# and rates per SM are those of the architecture whitepapers:
#   A100 (GA100): 108 SMs, 1,410 MHz, 64 FP32 lanes and 1,024 dense FP16 multiply-adds per SM per clock.
#   H100 (GH100): SXM 132 SMs, PCIe 114; tensor work boosts to 1,830 and 1,620 MHz, FP32 to 1,980 and 1,755;
#     128 FP32 lanes, twice the A100's tensor rate. H200 SXM has the same GPU as H100 SXM.
#   H100 NVL: 132 SMs, 1,785 MHz (product brief).
#   RTX 3090 (GA102): 82 SMs, 1,695 MHz. RTX 4090 (AD102): 128 SMs, 2,520 MHz. RTX 5090 (GB202): 170 SMs,
#     2,407 MHz. RTX 5070 Ti (GB203): 70 SMs, 2,452 MHz. 128 FP32 lanes per SM; the tensor cores do 256 FP16
#     multiply-adds per SM per clock with FP32 accumulation, half of the rate with FP16 accumulation.
#   RTX A6000 (GA102): 84 SMs, 1,800 MHz, tensor cores at the full rate with FP32 accumulation.
#   L40S (AD102): 142 SMs, 2,520 MHz; not a GeForce, so FP32 accumulation runs at the full rate.
#   MI300X (CDNA 3): 304 compute units, 2,100 MHz; 256 FP32, 2,048 FP16 FLOPs per unit per clock.
@pytest.mark.parametrize(
    ("name", "dtype", "units", "flops_per_unit_per_clock", "clock_hz"),
    [
        ("A100 SXM 40GB", "fp32", 108, 2 * 64, 1.410e9),
        ("A100 SXM 40GB", "bf16", 108, 2048, 1.410e9),
        ("A100 PCIe 40GB", "fp16", 108, 2048, 1.410e9),
        ("A100 SXM 80GB", "bf16", 108, 2048, 1.410e9),
        ("A100 PCIe 80GB", "bf16", 108, 2048, 1.410e9),
        ("H100 SXM", "fp32", 132, 2 * 128, 1.980e9),
        ("H100 SXM", "bf16", 132, 4096, 1.830e9),
        ("H200 SXM", "fp32", 132, 2 * 128, 1.980e9),
        ("H100 PCIe", "fp32", 114, 2 * 128, 1.755e9),
        ("H100 NVL", "fp32", 132, 2 * 128, 1.785e9),
        ("RTX 3090", "fp32", 82, 2 * 128, 1.695e9),
        ("RTX 4090", "fp32", 128, 2 * 128, 2.520e9),
        ("RTX 4090", "fp8", 128, 1024, 2.520e9),
        ("RTX 5070 Ti", "fp32", 70, 2 * 128, 2.452e9),
        ("RTX 5070 Ti", "fp8", 70, 1024, 2.452e9),
        ("RTX 5090", "fp32", 170, 2 * 128, 2.407e9),
        ("RTX 5090", "fp8", 170, 1024, 2.407e9),
        ("L40S", "fp32", 142, 2 * 128, 2.520e9),
        ("MI300X", "fp32", 304, 256, 2.100e9),
        ("MI300X", "bf16", 304, 2048, 2.100e9),
    ],
)
def test_peak_follows_from_units_and_clock(
    name: str, dtype: str, units: int, flops_per_unit_per_clock: int, clock_hz: float
) -> None:
    # Data sheets round to two figures for FP32, hence 0.6 %; a factor of two would never pass.
    assert peak(name, dtype) == pytest.approx(units * flops_per_unit_per_clock * clock_hz, rel=6e-3)


def test_l40s_half_precision_is_the_printed_dense_figure() -> None:
    # The sheet prints 362.05 dense, 1.2 % under 142 SMs x 1,024 x 2.52 GHz; no sparse 733 slipped in.
    assert peak("L40S", "bf16") == pytest.approx(142 * 1024 * 2.520e9, rel=0.013)


# NVIDIA's figures with sparsity, in units of 1e12, for the row's number of GPUs.
@pytest.mark.parametrize(
    ("name", "gpus", "tf32", "bf16", "fp8"),
    [
        ("H200 SXM", 1, 989, 1979, 3958),
        ("H200 NVL", 1, 835, 1671, 3341),
        ("H100 NVL", 1, 835, 1671, 3341),
        ("H100 PCIe", 1, 756, 1513, 3026),
        ("GH200", 1, 989, 1979, 3958),
        ("B200", 8, 18_000, 36_000, 72_000),
        ("B300", 8, 18_000, 36_000, 72_000),
        ("GB200", 72, 180_000, 360_000, 720_000),
    ],
)
def test_sparse_figures_were_halved(name: str, gpus: int, tf32: int, bf16: int, fp8: int) -> None:
    printed = {"tf32": tf32, "bf16": bf16, "fp16": bf16, "fp8": fp8}
    for dtype, figure in printed.items():
        assert peak(name, dtype) == pytest.approx(figure * 1e12 / gpus / 2)


def test_a_source_names_the_figure_printed_for_its_format() -> None:
    printed = re.compile(r"printed (for eight GPUs )?with sparsity as ([\d.,]+) ([TP])FLOPS, ")
    found = [
        (peak, told) for spec in catalogue() for peak in spec.peaks.values() if (told := printed.search(peak.source))
    ]
    assert len(found) == 8 * 4
    for peak, told in found:
        figure = float(told[2].replace(",", "")) * {"T": 1e12, "P": 1e15}[told[3]]
        assert peak.flops_per_s == pytest.approx(figure / 2 / (8 if told[1] else 1))


@pytest.mark.parametrize("name", DATA_CENTRE)
def test_data_centre_tensor_rates_double_as_the_format_halves(name: str) -> None:
    # 1.2 % for the L40S, whose sheet is off by that much; see above.
    assert peak(name, "tf32") == pytest.approx(peak(name, "bf16") / 2, rel=0.013)
    if hardware_named(name).peak_flops("fp8"):
        assert peak(name, "fp8") == pytest.approx(2 * peak(name, "bf16"), rel=0.013)


@pytest.mark.parametrize("name", GEFORCE)
def test_geforce_tf32_is_no_faster_than_fp32(name: str) -> None:
    assert peak(name, "tf32") == peak(name, "fp32")
    assert peak(name, "bf16") == pytest.approx(2 * peak(name, "fp32"), rel=2e-3)


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_bf16_and_fp16_have_one_rate(spec: HardwareSpec) -> None:
    assert peak(spec.name, "bf16") == peak(spec.name, "fp16")


def test_ampere_has_no_fp8() -> None:
    for name in ("RTX 3090", "RTX A6000", "A100 SXM 40GB", "A100 PCIe 40GB", "A100 SXM 80GB", "A100 PCIe 80GB"):
        assert hardware_named(name).peak_flops("fp8") is None
    assert hardware_named("H200 SXM").peak_flops("int3") is None


# Bandwidth = bus width in bits x data rate per pin / 8.
@pytest.mark.parametrize(
    ("name", "bus_bits", "bits_per_s_per_pin"),
    [
        ("A100 SXM 40GB", 5120, 2 * 1.215e9),
        ("A100 PCIe 40GB", 5120, 2 * 1.215e9),
        ("A100 SXM 80GB", 5120, 2 * 1.593e9),
        ("A100 PCIe 80GB", 5120, 2 * 1.512e9),
        ("H100 SXM", 5120, 2 * 2.619e9),
        ("H100 NVL", 6016, 2 * 2.619e9),
        ("H20", 6144, 5.2e9),
        ("L40S", 384, 18e9),
        ("RTX A6000", 384, 16e9),
        ("RTX 3090", 384, 19.5e9),
        ("RTX 4090", 384, 21e9),
        ("RTX 5070 Ti", 256, 28e9),
        ("RTX 5090", 512, 28e9),
        ("MI300X", 8192, 5.2e9),
    ],
)
def test_memory_bandwidth_follows_from_the_bus(name: str, bus_bits: int, bits_per_s_per_pin: float) -> None:
    expected = bus_bits * bits_per_s_per_pin / 8
    assert hardware_named(name).memory_bandwidth_bytes_per_s == pytest.approx(expected, rel=0.012)


# Links per GPU x what one link carries in both directions; PCIe: lanes x transfers x directions / 8 bits.
@pytest.mark.parametrize(
    ("interconnect", "names", "expected"),
    [
        ("NVLink 5", ("B200", "GB200", "B300"), 18 * 100e9),
        ("NVLink 4", ("H100 SXM", "H200 SXM", "H20", "GH200"), 18 * 50e9),
        ("NVLink 4 bridge", ("H200 NVL",), 18 * 50e9),
        ("NVLink 4 bridge", ("H100 NVL", "H100 PCIe"), 12 * 50e9),
        ("NVLink 3", ("A100 SXM 40GB", "A100 SXM 80GB"), 12 * 50e9),
        ("NVLink 3 bridge", ("A100 PCIe 40GB", "A100 PCIe 80GB"), 12 * 50e9),
        ("NVLink 3 bridge", ("RTX 3090", "RTX A6000"), 4 * 2 * 14.0625e9),
        ("PCIe 4.0 x16", ("L40S", "RTX 4090"), 16 * 16e9 * 2 / 8),
        ("PCIe 5.0 x16", ("RTX 5070 Ti", "RTX 5090"), 16 * 32e9 * 2 / 8),
        ("Infinity Fabric", ("MI300X",), 7 * 128e9),
    ],
)
def test_interconnect_follows_from_its_links(interconnect: str, names: tuple[str, ...], expected: float) -> None:
    for name in names:
        assert hardware_named(name).interconnect == interconnect
        assert hardware_named(name).interconnect_bytes_per_s == expected


# What nvidia-smi shows as total memory, in MiB: a little under the stated capacity in units of 2**30, and for
# the H200 more than 141e9 bytes, which is why GB cannot mean 1e9 here.
@pytest.mark.parametrize(
    ("name", "shown_mib"),
    [
        ("H200 SXM", 143_771),
        ("H200 NVL", 143_771),
        ("H100 SXM", 81_559),
        ("H100 PCIe", 81_559),
        ("H100 NVL", 95_830),
        ("B200", 183_359),
        ("B300", 275_040),
        ("H20", 97_871),
        ("GB200", 189_471),
        ("RTX 5070 Ti", 16_303),
    ],
)
def test_memory_is_what_the_device_shows_and_little_more(name: str, shown_mib: int) -> None:
    assert 0.99 < shown_mib * MIB / hardware_named(name).memory_bytes <= 1


@pytest.mark.parametrize("spec", catalogue(), ids=lambda spec: spec.name)
def test_every_entry_is_whole(spec: HardwareSpec) -> None:
    assert spec.memory_bytes % GIB == 0
    assert {"fp32", "tf32", "bf16", "fp16"} <= set(spec.peaks)
    figures = {"memory_bytes", "memory_bandwidth_bytes_per_s", "interconnect_bytes_per_s", *spec.peaks}
    optional = {"usable_bytes": spec.usable_bytes, "multiprocessors": spec.multiprocessors}
    assert set(spec.sources) - set(optional) == figures
    for figure, value in optional.items():
        assert (figure in spec.sources) == (value is not None)
    assert spec.usable_bytes is None or 0.92 < spec.usable_bytes / spec.memory_bytes < 1
    vendor = r"https://[a-z.]*(nvidia|nvdam\.widen|amd)\.(com|net)/"
    for figure, citation in spec.sources.items():
        assert figure in optional or re.search(vendor, citation) or spec.name == "H20"  # which has no public page
    for dtype, stated in spec.peaks.items():
        assert stated.source == spec.sources[dtype]


def test_the_catalogue_holds_these_gpus() -> None:
    assert sorted(spec.name for spec in catalogue()) == sorted((*DATA_CENTRE, *GEFORCE))


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_device_is_found_by_its_exact_name(device_name: str, name: str) -> None:
    found = sure(find_hardware(device_name))
    assert found.name == name


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "H200 SXM",
        "nvidia h200",
        "NVIDIA H200 ",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA H20-3e",
        "NVIDIA H100",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
        "NVIDIA GeForce RTX 5070",
        "NVIDIA GeForce RTX 3090 Ti",
        "AMD Instinct MI325X",
        "Some Future GPU",
    ],
)
def test_no_gpu_gets_the_figures_of_another(device_name: str) -> None:
    assert find_hardware(device_name) is None


def test_short_names_ignore_case() -> None:
    assert hardware_named(" rtx 5070 TI ") is hardware_named("RTX 5070 Ti")
    for spec in catalogue():
        assert hardware_named(spec.name.lower()) is spec


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("200", "did you mean H200 SXM or H200 NVL"),
        ("RTX 409", "did you mean RTX 4090?"),
        ("V100", "; choose one of"),
        ("", "; choose one of"),
    ],
)
def test_a_part_of_a_name_is_completed(asked: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        hardware_named(asked)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("H200", "H200 SXM"),
        ("h100", "H100 SXM"),
        ("A100", "A100 SXM 80GB"),
        ("RTX4090", "RTX 4090"),
        ("h200-sxm", "H200 SXM"),
    ],
)
def test_a_chip_alone_is_its_module_with_most_memory(asked: str, name: str) -> None:
    assert hardware_named(asked).name == name


def test_the_name_that_torch_gives_a_gpu_is_taken_too() -> None:
    assert hardware_named("nvidia h100 80gb hbm3").name == "H100 SXM"


def test_an_unknown_short_name_lists_the_valid_ones() -> None:
    with pytest.raises(UserError) as caught:
        hardware_named("H300")
    assert "H300" in str(caught.value)
    assert caught.value.exit_code == 2
    for spec in catalogue():
        assert spec.name in str(caught.value)


DOCUMENTS = """
[documents]
sheet = "Vendor X1 data sheet, https://example.com"
"""
GPU = """
[[gpu]]
name = "X1"
device_names = ["Vendor X1"]
memory_bytes = 1_073_741_824
memory_bandwidth_bytes_per_s = 1e12
interconnect = "Link"
interconnect_bytes_per_s = 1e9
peaks = { bf16 = 1e12 }
sources = [
    { covers = ["memory_bytes", "memory_bandwidth_bytes_per_s"], document = "sheet", note = "page 1" },
    { covers = ["interconnect_bytes_per_s"], document = "sheet", note = "page 2" },
    { covers = ["bf16"], document = "sheet", note = "halved" },
]
"""
GOOD = DOCUMENTS + GPU


def test_a_good_catalogue_is_read() -> None:
    (spec,) = parse_catalogue(GOOD)
    found = sure(spec.peak_flops("bf16"))
    assert (found.flops_per_s, found.source) == (1e12, "Vendor X1 data sheet, https://example.com; halved")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("bf16 = 1e12", "bf16 = 0.0", "peaks"),
        ("bf16 = 1e12", "bf16 = nan", "peaks"),
        ("memory_bytes = 1_073_741_824", "memory_bytes = -1", "memory_bytes"),
        ("memory_bytes = 1_073_741_824", "memory_bytes = 0.5", "memory_bytes"),
        ("1e9", "0", "interconnect_bytes_per_s"),
        ('interconnect = "Link"', "", "interconnect"),
        ("bf16 = 1e12", "bf16 = 1e12, fp8 = 2e12", "fp8"),
        ('document = "sheet"', 'document = "rumour"', "rumour"),
    ],
)
def test_a_broken_catalogue_is_refused(old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    with pytest.raises((ValueError, KeyError), match=re.escape(complaint)):
        parse_catalogue(GOOD.replace(old, new))


TABLES = tomllib.loads((resources.files("steplab.specs") / "hardware.toml").read_text(encoding="utf-8"))
ENTRIES = [*TABLES["gpu"], *TABLES["tpu"]]


def test_no_gpu_stands_in_the_catalogue_twice() -> None:
    names = [entry["name"].casefold() for entry in ENTRIES]
    devices = [name for entry in TABLES["gpu"] for name in entry["device_names"]]
    for each in (names, devices):
        assert len(set(each)) == len(each)
        assert all(name == name.strip() != "" for name in each)
    assert all(entry["device_names"] for entry in TABLES["gpu"])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_every_figure_has_one_source(entry: dict[str, Any]) -> None:
    texts = ("name", "device_names", "platform", "interconnect", "peaks", "sources")
    figures = {**{name: value for name, value in entry.items() if name not in texts}, **entry["peaks"]}
    assert entry["peaks"].keys() <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert entry.keys() <= {field.name for field in dataclasses.fields(HardwareSpec)}
    assert all(map(math.isfinite, figures.values()))
    covered = [figure for source in entry["sources"] for figure in source["covers"]]
    assert sorted(covered) == sorted(figures)
    for source in entry["sources"]:
        assert TABLES["documents"][source["document"]].strip()
        assert source["note"].strip()
