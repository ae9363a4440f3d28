"""Hardware sheets: published figures of the devices that a cost can be computed for, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """What XLA must know of a GPU to compile for it where there is none.

    Attributes:
        name:       Device kind.
        capability: Major compute capability.
        cores:      Streaming multiprocessors.
        clock:      GHz.
        l2:         Bytes of the L2 cache.
    """

    name: str
    capability: int
    cores: int
    clock: float
    l2: int


@dataclass(frozen=True)
class Hardware:
    """Figures of one device.

    Attributes:
        name:       Name for tables.
        bandwidth:  Bytes of memory per second.
        fp32:       FLOPs per second of products in float32; on GPUs in TF32, as XLA computes them.
        bf16:       FLOPs per second of dense products in bfloat16.
        fp8:        FLOPs per second of dense products in 8 bits; None where the device has none.
        memory:     Bytes of memory.
        link:       Bytes per second that a device sends to others of its host, one way.
        per_host:   Devices of a host, or of a link domain, as it is sold.
        overlapped: Whether it reads memory while it computes, so that the longer of both counts and not their sum.
        sources:    Source of each figure, by field. Where two sources differ, the second is named too.
        chip:       For compiling; None where `launch.plan` cannot.
    """

    name: str
    bandwidth: float
    fp32: float
    bf16: float
    fp8: float | None
    memory: float
    link: float
    per_host: int
    overlapped: bool
    sources: Mapping[str, str]
    chip: Chip | None = None

    def peak(self, weight_bytes: int) -> float:
        """Return the FLOPs per second of products with weights of so many bytes.

        Raises ValueError where the device has no such products.
        """
        found = {4: self.fp32, 2: self.bf16, 1: self.fp8}.get(weight_bytes)
        if found is None:
            raise ValueError(f"weight_bytes = {weight_bytes}: {self.name} has no such products; must be 4, 2 or 1")
        return found


_XLA = "xla/backends/gpu/target_config/specs of openxla/xla"
_LOCKWOOD = "glennklockwood.com/garden/processors"
_TF32 = "half of bf16 (NVIDIA datasheet)"
_OVERLAP = "a GPU's memory and tensor cores work at the same time"


def _sources(figures: str, *, xla: bool = True, **other: str) -> dict[str, str]:
    """Return the source of each field. figures: of those that `other` does not name. xla: XLA gives memory and chip."""
    measured = dict.fromkeys(("bandwidth", "memory", "chip"), _XLA if xla else figures)
    named = dict.fromkeys(("bf16", "fp8", "link", "per_host"), figures)
    return named | {"fp32": _TF32, "overlapped": _OVERLAP} | measured | other


HARDWARE = {
    "a100": Hardware(
        "A100 80GB SXM", 2.039e12, 156e12, 312e12, None, 80e9, 300e9, 8, True,
        _sources(f"{_LOCKWOOD}/A100, NVIDIA's datasheet", xla=False),
    ),
    "h20": Hardware(
        "H20", 4.0e12, 74e12, 148e12, 296e12, 96e9, 450e9, 8, True,
        _sources("willitrunai.com/gpus/h20-96gb; no datasheet of NVIDIA's was found", xla=False),
    ),
    "h100": Hardware(
        "H100 SXM", 3.35232e12, 494.5e12, 989e12, 1979e12, 84.942979072e9, 450e9, 8, True,
        _sources(f"{_LOCKWOOD}/h100, NVIDIA's datasheet"),
        Chip("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 52_428_800),
    ),
    "h200": Hardware(
        "H200 SXM", 4.8e12, 494.5e12, 989e12, 1979e12, 151.397597184e9, 450e9, 8, True,
        _sources("NVIDIA's page of the H200 (3,958 TFLOP/s sparse), through morphllm.com/nvidia-h200"),
        Chip("NVIDIA H200 141GB HBM3e", 9, 132, 1.98, 52_428_800),
    ),
    "b200": Hardware(
        "B200 HGX", 7.67232e12, 1125e12, 2250e12, 4500e12, 191.514411008e9, 900e9, 8, True,
        _sources(
            f"{_LOCKWOOD}/B200; verda.com/blog/gb300-nvl72-architecture",
            bandwidth=f"{_XLA}; Verda: 7.7 TB/s; glennklockwood.com: 8.0 TB/s",
        ),
        Chip("NVIDIA B200", 10, 148, 1.965, 132_644_864),
    ),
    "gb200": Hardware(
        "GB200", 7.928064e12, 1250e12, 2500e12, 5000e12, 197.89774848e9, 900e9, 4, True,
        _sources(
            f"{_LOCKWOOD}/B200 at 1,200 W; Verda: 2,250 TFLOP/s",
            bandwidth=f"{_XLA}; glennklockwood.com: 8.0 TB/s",
            memory=f"{_XLA}; arXiv 2604.26779: 186 GB",
            per_host="NVIDIA's GB200 NVL72: 4 GPUs a tray, 72 in one NVLink domain",
        ),
        Chip("NVIDIA GB200", 10, 152, 2.062, 135_528_448),
    ),
    "cpu": Hardware(
        "2 cores of an AMD EPYC with AVX-512", 50e9, 166e9, 166e9, None, 16e9, 50e9, 1, False,
        {
            "bandwidth": "copy of 268 MB, section floor of benchmarks/results/bench_25m/bench.json: 50 to 70 GB/s",
            "fp32": "2 cores x 2.6 GHz x 32 operations a cycle (one 512-bit multiply-add, Zen 4)",
            "bf16": "as float32: XLA's CPU backend widens it",
            "fp8": "no such products",
            "memory": "assumed: a small machine",
            "link": "as bandwidth: devices of one machine share its memory",
            "per_host": "one machine",
            "overlapped": "a cost of reading plus computing fits bench_25m better than the longer of both",
        },
    ),
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """Return the sheet of that name. Raises ValueError if there is none."""
    if name not in HARDWARE:
        raise ValueError(f"hardware = {name}: no such sheet; must be one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
