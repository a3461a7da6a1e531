"""GPU models ("cards") of projections, and peaks of known ones without sparsity, from data sheets."""

import dataclasses
import difflib
import re
from dataclasses import dataclass

from graphmoe.config.formats import Gpu
from graphmoe.config.schema import ConfigError

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Card:
    name: str
    tflops: float
    memory_gb: float
    """Vendor's figure in decimal GB; drivers leave a little more or less."""
    hbm_tb_per_s: float
    node_gb_per_s: float
    """Peak speed to the GPUs of its node, one direction, all links."""
    peer_gb_per_s: float
    """Peak speed to one other GPU: all links through NVSwitch, one of seven between AMD GPUs."""
    network_gb_per_s: float
    per_node: int = GPUS_PER_NODE
    domain: int = 0
    """GPUs of several nodes that fast links join; 0: those of a node."""
    host_gb_per_s: float = 50.0
    """Speed to host memory, one direction while the other is as busy: assumed of 63 of PCIe 5 x16."""
    is_announced: bool = False
    """True if the vendor has announced the card, and no data sheet is public."""

    @property
    def linked(self) -> int:
        return self.domain or self.per_node

    @property
    def fp8_tflops(self) -> float:
        """Peak fp8 TFLOP/s without sparsity: twice bf16 in the data sheets of all GPUs here."""
        return 2 * self.tflops

    @property
    def gpu(self) -> Gpu:
        if self.is_nvidia:
            return Gpu(major=9 if self.name.startswith("H") else 10, cuda=(12, 9))
        return Gpu("gfx942" if self.name.startswith("MI3") and self.name != "MI355X" else "gfx950")

    @property
    def is_nvidia(self) -> bool:
        return not self.name.startswith("MI")


# A 400 Gb/s NIC for each GPU: ConnectX-7 of DGX and HGX, Pollara 400 or Thor 2 of Instinct
_NIC_GB_PER_S = 50.0

# AMD Instinct MI300X data sheet: 192 GB HBM3, 5.3 TB/s; seven peer links of 128 GB/s both ways
MI300X = Card("MI300X", 1307.4, 192, 5.3, 448, 64, _NIC_GB_PER_S)
# AMD Instinct MI325X data sheet: 256 GB HBM3E, 6 TB/s; seven peer links of 128 GB/s both ways
MI325X = Card("MI325X", 1307.4, 256, 6.0, 448, 64, _NIC_GB_PER_S)
# AMD Instinct MI355X data sheet: 288 GB HBM3E, 8 TB/s; seven peer links of 153.6 GB/s both ways
MI355X = Card("MI355X", 2516.6, 288, 8.0, 537.6, 76.8, _NIC_GB_PER_S)
# NVIDIA H100 SXM data sheet: 80 GB HBM3, 3.35 TB/s; NVLink of 900 GB/s both ways
H100 = Card("H100", 989.4, 80, 3.35, 450, 450, _NIC_GB_PER_S)
# NVIDIA H200 SXM data sheet: 141 GB HBM3e, 4.8 TB/s; NVLink of 900 GB/s both ways
H200 = Card("H200", 989.4, 141, 4.8, 450, 450, _NIC_GB_PER_S)
# NVIDIA HGX B200 data sheet: 180 GB HBM3e (1.44 TB of eight), 8 TB/s; NVLink of 1.8 TB/s both ways
B200 = Card("B200", 2250.0, 180, 8.0, 900, 900, _NIC_GB_PER_S)

# NVIDIA GB200 NVL72 data sheet, per GPU: 186 GB HBM3e, 8 TB/s; racks of 18 nodes; ConnectX-7
GB200 = Card("GB200", 2500.0, 186, 8.0, 900, 900, _NIC_GB_PER_S, per_node=4, domain=72)
# NVIDIA GB300 NVL72 data sheet, per GPU: 279 GB HBM3e (20 TB of 72), 8 TB/s; ConnectX-8 of 800 Gb/s
GB300 = Card("GB300", 2500.0, 279, 8.0, 900, 900, 100.0, per_node=4, domain=72)
# AMD Instinct MI455X in Helios racks, only announced (Advancing AI 2025, CES 2026): 20 PFLOP/s fp8, bf16
# assumed half of it; 432 GB HBM4, 19.6 TB/s; 3.6 TB/s both ways to 71 others; 300 GB/s between racks
MI450 = Card("MI450", 10_000.0, 432, 19.6, 1800, 1800, 300.0, 4, 72, is_announced=True)

CARDS = {card.name.lower(): card for card in (MI300X, MI325X, MI355X, MI450, H100, H200, B200, GB200, GB300)}


# (words of a device's name, dense bf16 TFLOP/s). Names of `CARDS` are tried later: some are words in these.
_OTHER_PEAKS: tuple[tuple[str, float], ...] = (
    # AMD Instinct data sheets, "Peak bfloat16": amd.com/en/products/accelerators/instinct.html
    ("MI350X", 2309.6),
    ("MI300A", 980.6),
    ("MI250X", 383.0),
    ("MI250", 362.1),
    ("MI210", 181.0),
    # NVIDIA H200, GH200 and H100 data sheets; the PCIe and NVL forms have lower clocks
    ("H200 NVL", 835.5),
    ("GH200", 989.4),
    ("H100 PCIE", 756.5),
    ("H100 NVL", 835.5),
    ("H800 PCIE", 756.5),
    ("H800", 989.4),
    ("H20", 148.0),
    # NVIDIA Ampere and Ada data sheets
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.1),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    # NVIDIA Ada architecture white paper, appendix A: bf16 with fp32 accumulation
    ("4090", 165.2),
)


def card_of(name: str) -> Card:
    if name.lower() not in CARDS:
        close = difflib.get_close_matches(name.lower(), CARDS, n=1, cutoff=0.8)  # a100 does not mean h100
        meant = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"hardware={name} is not known{meant}; use one of {', '.join(CARDS)}")
    return CARDS[name.lower()]


def card_in(device_name: str) -> Card | None:
    """Return the card by torch's device name, with the peak of this variant; None if unknown."""
    words, peak = device_words(device_name), peak_tflops(device_name)
    found = next((card for card in CARDS.values() if card.name in words), None)
    return dataclasses.replace(found, tflops=peak) if found and peak else None


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak in TFLOP/s by torch's device name; None if unknown or a MIG slice."""
    words = device_words(device_name)
    if "MIG" in words:
        return None
    of_cards = ((card.name, card.tflops) for card in CARDS.values())
    peaks = (peak for required, peak in (*_OTHER_PEAKS, *of_cards) if words.issuperset(required.split()))
    return next(peaks, None)


def device_words(device_name: str) -> set[str]:
    """Return the words of a device name, in capitals; so "GH200" is not mistaken for an H200."""
    return set(re.split(r"[^A-Z0-9]+", device_name.upper()))
