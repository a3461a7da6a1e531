"""Optimizer state in host memory (``optim.offload``), streamed through the device during the update.

While a piece is updated, the next ones are copied to the device and the one before is copied back, each
direction on a stream of its own. A piece is read and written once: AdamW in fp32 copies 12 bytes of each
element that a rank owns in each direction, which takes at least 12 bytes * elements / 50 GB/s over PCIe 5.

The clipping factor needs the norm of all gradients, so no update overlaps with the backward; only the first
`SLOTS` pieces are copied to the device before the norm is known.
"""

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError
from graphmoe.optim.storage import ROW, Region
from graphmoe.plan.buckets import PIECE_ELEMENTS, SLOT_SLACK, SLOTS

ALIGNED = 16  # bytes: compiled code copies inputs at other addresses
Pair = tuple[Tensor, Tensor]  # copies the second to the first


def host_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [size] in host memory, pinned if ``device`` is a GPU. *Raises* ConfigError."""
    if device.type != "cuda":
        return torch.zeros(size, dtype=dtype)
    # Whole pages, registered: torch's allocator of pinned memory would round up to a power of two.
    num_bytes = -(-max(size, 1) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    # Tensors keep the map, and a storage's Python object may end before its memory.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory, runtime = torch.frombuffer(pages, dtype=torch.uint8), torch.cuda.cudart()
    address = memory.data_ptr()
    if int(error := runtime.cudaHostRegister(address, num_bytes, 0)):
        raise ConfigError(
            f"optim.offload=true: {num_bytes / 2**30:.1f} GiB of host memory cannot be pinned ({error}); "
            f"raise the limit of locked memory (ulimit -l), or use optim.offload=false"
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return memory[: size * dtype.itemsize].view(dtype)


class _Piece(NamedTuple):
    staged: Region  # its state in a slot, its gradient and weights in their own buffers
    fetches: list[Pair]
    stores: list[Pair]


class HostState:
    """Regions whose state is in host memory, updated piece by piece in device slots. No device sync."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        parts = [piece for region in regions for piece in pieces_of(region)]
        size = max((sum(each.nbytes for each in _moved(part)) for part in parts), default=0) + SLOT_SLACK
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.pieces = [_placed(part, self.slots[i % SLOTS]) for i, part in enumerate(parts)]
        self._device, self._inward, self._outward = device, _Copies(device), _Copies(device)

    @property
    def regions(self) -> list[Region]:
        """Return the staged region of each piece."""
        return [piece.staged for piece in self.pieces]

    def start(self) -> None:
        """Start to fetch the first pieces; call `update` next."""
        if self.pieces:
            self._inward.follow()
        for number in range(min(SLOTS, len(self.pieces))):
            self._inward.copy(number, self.pieces[number].fetches)

    def update(self, run: Callable[[Region], object]) -> None:
        """Call ``run`` on each staged piece in turn; the current stream waits for the last copies."""
        for number, piece in enumerate(self.pieces):
            slot, later = number % SLOTS, number + SLOTS
            self._inward.wait(slot)
            run(piece.staged)
            self._outward.follow()
            self._outward.copy(slot, piece.stores)
            if later < len(self.pieces):
                self._inward.copy(slot, self.pieces[later].fetches, after=self._outward)
        if self.pieces:  # else no copy joined a capture
            self._inward.join()
            self._outward.join()

    def settle(self) -> None:
        """Wait until host memory has the last update, also one that a graph replayed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Copies:
    """A stream of copies, with an event for each slot; on a CPU copies are immediate."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = [torch.cuda.Event() for _ in range(SLOTS)] if self._stream else []

    def copy(self, slot: int, pairs: Iterable[Pair], after: "_Copies | None" = None) -> None:
        if self._stream is None:
            for to, source in pairs:
                to.copy_(source)
            return
        if after is not None:
            self._stream.wait_event(after._done[slot])
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            self._done[slot].record()

    def wait(self, slot: int) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done[slot])

    def follow(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def pieces_of(region: Region) -> list[Region]:
    """Return a region in pieces of `PIECE_ELEMENTS`; matrices are one piece, as one batch is one product."""
    if region.grad.dim() == 3:
        return [region]
    rows = PIECE_ELEMENTS // (ROW if region.grad.dim() == 2 else 1)
    split = zip(*(tensor.split(rows) for tensor in region.tensors), strict=True)
    return [region.of(piece) for piece in split]


def _moved(region: Region) -> list[Tensor]:
    # master weights that are the model's own weights stay on the device
    mains = [region.main] if region.rounded else []
    return [*mains, *region.moments, *region.scales, *region.origins]


def _placed(part: Region, slot: Tensor) -> _Piece:
    staged, start = dict[int, Tensor](), 0
    moved = _moved(part)
    for tensor in moved:
        view = slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged[id(tensor)], start = view, -(-(start + tensor.nbytes) // ALIGNED) * ALIGNED
    region = part.of(staged.get(id(tensor), tensor) for tensor in part.tensors)
    fetches = [(staged[id(tensor)], tensor) for tensor in moved]
    kept = {id(tensor) for tensor in part.origins}
    stores = [(tensor, staged[id(tensor)]) for tensor in moved if id(tensor) not in kept]
    return _Piece(region, fetches, stores)
