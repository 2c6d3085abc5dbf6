"""Batches of any shape: their size, their move to a device, a light copy, a touch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PAGE = 4096


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same containers with every leaf changed: a copy at container level."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        values = {key: mapped(value, change) for key, value in batch.items()}
        return _same_mapping(batch, values)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return _same_sequence(batch, [mapped(value, change) for value in batch])
    return change(batch)


def _same_sequence(batch: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    """Keep a subclass, where it is made as lists and tuples are."""
    try:
        return type(batch)(values)
    except TypeError:
        return values if isinstance(batch, list) else tuple(values)


def _same_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Keep a dict subclass: the user's loss may call its methods."""
    if type(batch) is dict:
        return values
    try:
        copied: Any = copy.copy(batch)
        for key, value in values.items():
            copied[key] = value
    except TypeError:
        return values
    return copied


def moved(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """The batch on the device.

    Raises:
        TypeError: If a leaf that has no `to` must go to an accelerator.
    """
    if device.type == "cpu":
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, str | bytes | int | float | None):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if hasattr(leaf, "to"):
            return leaf.to(device)
        raise TypeError(f"cannot move a batch of type {type(leaf).__name__} to {device}")

    return mapped(batch, move)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in the batch, attributes of unknown objects included."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)
    elif hasattr(batch, "__dict__"):
        yield from (value for value in vars(batch).values() if isinstance(value, Tensor))


def size_bytes(batch: Any) -> int:
    """Bytes of all tensors in the batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def leading(batch: Any) -> int:
    """The length of the first tensor, 1 where there is none."""
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    return 1


def touch(batch: Any) -> None:
    """Read one element a page: a real consumer pays for the page faults of shared memory."""
    for tensor in tensors_of(batch):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_contiguous():
            stride = max(1, PAGE // tensor.element_size())
            tensor.view(-1)[::stride].sum()
