"""The cards that a run is projected for, by the figures of their vendors.

From AMD's data sheets of Instinct MI300X, MI325X and MI355X (peak dense bf16 1307.4, 1307.4 and 2516.6
TFLOP/s) and NVIDIA's of H100 SXM, H200 SXM and HGX B200 (989.4, 989.4 and 2250 TFLOP/s dense, half of the
sparse figures that they state). Peaks are in `graphmoe.model.flops`; memory, bandwidth and links are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphmoe.config.arguments import nearest
from graphmoe.config.schema import ConfigError
from graphmoe.model.flops import peak_tflops

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Card:
    """One GPU of a node of eight, and what it reaches of the others."""

    name: str
    memory_gb: float
    """As the vendor states it, read as decimal GB; drivers leave a little more or less than that."""
    hbm_tb_per_s: float
    """Peak bandwidth of its own memory."""
    node_gb_per_s: float
    """Peak of what it sends to the GPUs of its node, one direction, all links together."""
    peer_gb_per_s: float
    """Of that, to one other GPU: all of it through NVSwitch, one of seven links between AMD's."""
    network_gb_per_s: float
    """Peak of what it sends to other nodes, one direction."""

    @property
    def tflops(self) -> float:
        """Dense bf16 peak, of `graphmoe.model.flops`."""
        peak = peak_tflops(self.name)
        assert peak is not None
        return peak

    @property
    def is_nvidia(self) -> bool:
        return not self.name.startswith("MI")

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9


_NIC_GB_PER_S = 50.0
"""One network card of 400 Gb/s for each GPU: ConnectX-7 of DGX and HGX reference designs, Pollara 400 or
Thor 2 of Instinct platforms. A cluster with others differs."""

MI300X = Card("MI300X", 192, 5.3, 448, 64, _NIC_GB_PER_S)
"""AMD Instinct MI300X data sheet: 192 GB HBM3, 5.3 TB/s; seven links to peers of 128 GB/s both ways."""
MI325X = Card("MI325X", 256, 6.0, 448, 64, _NIC_GB_PER_S)
"""AMD Instinct MI325X data sheet: 256 GB HBM3E, 6 TB/s; seven links to peers of 128 GB/s both ways."""
MI355X = Card("MI355X", 288, 8.0, 537.6, 76.8, _NIC_GB_PER_S)
"""AMD Instinct MI355X data sheet: 288 GB HBM3E, 8 TB/s; seven links to peers of 153.6 GB/s both ways."""
H100 = Card("H100", 80, 3.35, 450, 450, _NIC_GB_PER_S)
"""NVIDIA H100 SXM data sheet: 80 GB HBM3, 3.35 TB/s; NVLink of 900 GB/s both ways."""
H200 = Card("H200", 141, 4.8, 450, 450, _NIC_GB_PER_S)
"""NVIDIA H200 SXM data sheet: 141 GB HBM3e, 4.8 TB/s; NVLink of 900 GB/s both ways."""
B200 = Card("B200", 180, 8.0, 900, 900, _NIC_GB_PER_S)
"""NVIDIA HGX B200 data sheet: 180 GB HBM3e of each GPU (1.44 TB of eight; the module has 192), 8 TB/s;
NVLink of 1.8 TB/s both ways."""

CARDS = {card.name.lower(): card for card in (MI300X, MI325X, MI355X, H100, H200, B200)}


def card_of(name: str) -> Card:
    """The card of a name as on the command line. *Raises* ConfigError."""
    if name.lower() not in CARDS:
        raise ConfigError(
            f"hardware={name} is not known{nearest(name.lower(), list(CARDS))}; use one of {', '.join(CARDS)}"
        )
    return CARDS[name.lower()]
