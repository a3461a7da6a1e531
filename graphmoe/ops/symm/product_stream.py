"""On which stream an exchange between ranks packs what it sends.

A transfer by copy engines hides beside products, but what it sends must be packed first. Kernels of another
stream that come when products have begun wait until these leave a multiprocessor, and the transfer waits with
them. So who runs an exchange beside products says on which stream these are, and the exchange packs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_products: torch.cuda.Stream | None = None
"""Of this process: autograd runs gradients in a thread of its own."""


@contextmanager
def beside_products_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Exchanges that are queued inside run beside products which are queued on ``stream`` afterwards."""
    global _products
    before, _products = _products, stream
    try:
        yield
    finally:
        _products = before


@contextmanager
def before_products() -> Iterator[None]:
    """Queue what is inside on the stream of the products, if there is one, behind all of the current stream.

    What follows on the current stream comes after it, so memory of the current stream may be used inside.
    """
    products = _products
    if products is None:
        yield
        return
    here = torch.cuda.current_stream()
    products.wait_stream(here)
    with torch.cuda.stream(products):
        yield
    here.wait_stream(products)
