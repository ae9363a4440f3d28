"""Hardware sheets: published figures of the devices that a cost can be computed for, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """A GPU as XLA must know it to compile for it where there is none.

    Attributes:
        capability: Major compute capability.
        cores:      Streaming multiprocessors.
        clock:      GHz.
        l2:         Bytes of the L2 cache.
    """

    capability: int
    cores: int
    clock: float
    l2: int


@dataclass(frozen=True)
class Hardware:
    """Figures of one device.

    Attributes:
        name:       Device kind, as the driver names it.
        bandwidth:  Bytes of memory per second.
        fp32:       FLOPs per second of products in float32; on GPUs in TF32, as XLA computes them.
        bf16:       FLOPs per second of dense products in bfloat16.
        fp8:        FLOPs per second of dense products in 8 bits; None where the device has none.
        memory:     Bytes of memory.
        link:       Bytes per second that a device sends to others of its link domain, one way.
        network:    Bytes per second that a device sends to those beyond.
        per_host:   Devices of a host, as it is sold.
        domain:     Devices that links join.
        overlapped: Whether it reads memory while it computes, so that a part of the shorter costs no time.
        sources:    Source of each figure, by field. Where two sources differ, the second is named too.
        chip:       For compiling; None where `launch.plan` cannot.
    """

    name: str
    bandwidth: float
    fp32: float
    bf16: float
    fp8: float | None
    memory: int
    link: float
    network: float
    per_host: int
    domain: int
    overlapped: bool
    sources: Mapping[str, str]
    chip: Chip | None = None

    def peak(self, weight_bytes: int) -> float:
        """Return the FLOPs per second of products with weights of so many bytes.

        Raises ValueError where the device has no such products.
        """
        flops = {4: self.fp32, 2: self.bf16, 1: self.fp8}.get(weight_bytes)
        if flops is None:
            allowed = "4, 2 or 1" if self.fp8 else "4 or 2"
            raise ValueError(f"weight_bytes = {weight_bytes}: {self.name} has no such products; must be {allowed}")
        return flops

    def between(self, devices: int) -> float:
        """Return the bytes per second that each device of a group of so many sends to the others."""
        return self.link if devices <= self.domain else self.network


_XLA = "xla/backends/gpu/target_config/specs of openxla/xla"
_LOCKWOOD = "glennklockwood.com/garden/processors"


def _gpu(
    name: str,
    bandwidth: float,
    bf16: float,
    fp8: float | None,
    memory: int,
    link: float,
    sources: Mapping[str, str],
    chip: Chip | None = None,
    per_host: int = 8,
    domain: int = 8,
) -> Hardware:
    """Return the sheet of a GPU. sources: of the fields that have one of their own, and `figures` of all others."""
    fields = "bandwidth", "bf16", "fp8", "memory", "link", "per_host", "domain"
    field_sources: dict[str, str] = dict.fromkeys(fields, sources["figures"])
    if chip is not None:
        field_sources |= dict.fromkeys(("bandwidth", "memory", "chip"), _XLA)
    field_sources["fp32"] = "half of bf16, NVIDIA's datasheets"
    field_sources["network"] = "assumed: one card of 400 Gbit/s for each GPU"
    field_sources["overlapped"] = "a GPU reads memory and multiplies at the same time"
    field_sources |= {field: source for field, source in sources.items() if field != "figures"}
    figures = bandwidth, bf16 / 2, bf16, fp8, memory, link, 50e9, per_host, domain
    return Hardware(name, *figures, overlapped=True, sources=field_sources, chip=chip)


# fmt: off
HARDWARE = {
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB",
        bandwidth=2.039e12, bf16=312e12, fp8=None, memory=80_000_000_000, link=300e9,
        sources={"figures": f"NVIDIA's datasheet, through {_LOCKWOOD}/A100"},
    ),
    "h20": _gpu(
        "NVIDIA H20",
        bandwidth=4.0e12, bf16=148e12, fp8=296e12, memory=96_000_000_000, link=450e9,
        sources={"figures": "willitrunai.com/gpus/h20-96gb; no datasheet of NVIDIA's was found"},
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3",
        bandwidth=3.35232e12, bf16=989e12, fp8=1979e12, memory=84_942_979_072, link=450e9,
        sources={"figures": f"NVIDIA's datasheet, through {_LOCKWOOD}/h100"},
        chip=Chip(capability=9, cores=132, clock=1.98, l2=52_428_800),
    ),
    "h200": _gpu(
        "NVIDIA H200 141GB HBM3e",
        bandwidth=4.8e12, bf16=989e12, fp8=1979e12, memory=151_397_597_184, link=450e9,
        sources={"figures": "NVIDIA's page of the H200 (3,958 TFLOP/s sparse), through morphllm.com/nvidia-h200"},
        chip=Chip(capability=9, cores=132, clock=1.98, l2=52_428_800),
    ),
    "b200": _gpu(
        "NVIDIA B200",
        bandwidth=7.67232e12, bf16=2250e12, fp8=4500e12, memory=191_514_411_008, link=900e9,
        sources={
            "figures": f"{_LOCKWOOD}/B200, HGX at 1,000 W; verda.com/blog/gb300-nvl72-architecture",
            "bandwidth": f"{_XLA}; Verda: 7.7 TB/s; glennklockwood.com: 8.0 TB/s",
        },
        chip=Chip(capability=10, cores=148, clock=1.965, l2=132_644_864),
    ),
    "gb200": _gpu(
        "NVIDIA GB200",
        bandwidth=7.928064e12, bf16=2500e12, fp8=5000e12, memory=197_897_748_480, link=900e9,
        sources={
            "figures": f"{_LOCKWOOD}/B200 at 1,200 W; Verda: 2,250 TFLOP/s in bf16",
            "bandwidth": f"{_XLA}; glennklockwood.com: 8.0 TB/s",
            "memory": f"{_XLA}; arXiv 2604.26779: 186 GB",
            "per_host": "NVIDIA's GB200 NVL72: trays of 4",
            "domain": "NVIDIA's GB200 NVL72",
        },
        chip=Chip(capability=10, cores=152, clock=2.062, l2=135_528_448),
        per_host=4, domain=72,
    ),
    "cpu": Hardware(
        "2 cores of an AMD EPYC with AVX-512",
        bandwidth=50e9, fp32=166e9, bf16=166e9, fp8=None, memory=16_000_000_000, link=50e9,
        network=1.25e9, per_host=1, domain=1, overlapped=False,
        sources={
            "bandwidth": "copy of 268 MB, section floor of benchmarks/results/bench_25m/bench.json: 50 to 70 GB/s",
            "fp32": "2 cores x 2.6 GHz x 32 operations a cycle (one multiply-add of 512 bits, Zen 4)",
            "bf16": "that of float32, to which XLA's CPU backend widens it",
            "memory": "assumed",
            "link": "that of memory: devices of one machine share it",
            "network": "assumed: 10 Gbit/s",
            "per_host": "one machine",
            "domain": "one machine",
            "overlapped": "with as many constants, the sum of both fits bench_25m better than the longer of both",
        },
    ),
}
# fmt: on


def find_hardware(name: str) -> Hardware:
    """Return the sheet of that name. Raises ValueError if there is none."""
    if name not in HARDWARE:
        raise ValueError(f"hardware = {name}: no such sheet; must be one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
