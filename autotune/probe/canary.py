"""Prove that a forked process can compute, and tell which devices there are."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Facts = dict[str, Any]

PARALLEL_LIMIT_S = 10
"""An operation of a millisecond that takes this long hangs."""


def check(threads: int) -> Facts:
    """Compute on several threads, on the device and backwards; return what devices there are."""
    # Dying early by SIGALRM spares the user the long wait that a slow device is allowed.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PARALLEL_LIMIT_S)
    torch.set_num_threads(threads)
    torch.sigmoid(torch.randn(400_000))
    signal.alarm(0)
    device = accelerator()
    if device is not None:
        torch.zeros(1, device=device)
        torch.accelerator.synchronize()
    (torch.ones(8, requires_grad=True, device=device) ** 2).sum().backward()  # type: ignore[no-untyped-call]
    return device_facts(device)


def accelerator() -> torch.device | None:
    """The accelerator that is really there, whatever torch was compiled for."""
    return torch.accelerator.current_accelerator(check_available=True)


def device_facts(device: torch.device | None) -> Facts:
    """Type, driver, and lists with one entry per device; what cannot be read is None."""
    if device is None:
        return {"type": "cpu"}
    indices = range(torch.accelerator.device_count())
    known = [_guarded(_properties_of(device.type), index) for index in indices]
    return {
        "type": device.type,
        "count": len(indices),
        "driver": _driver() if device.type == "cuda" else None,
        "devices": [f"{device.type}:{index}" for index in indices],
        **{name: [_guarded(read, one) for one in known] for name, read in READERS.items()},
    }


def _properties_of(kind: str) -> Callable[[int], Any]:
    return lambda index: getattr(torch, kind).get_device_properties(index)


def _guarded(read: Callable[[Any], Any], subject: Any) -> Any:
    """Builds, drivers and kinds of device differ in what they tell."""
    try:
        return read(subject)
    except (AttributeError, TypeError, ValueError, RuntimeError, AssertionError):
        return None


def _pci_id(properties: Any) -> str:
    """Domain, bus, device and function, in NVML's form."""
    domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:08X}:{bus:02X}:{slot:02X}.0"


READERS: dict[str, Callable[[Any], Any]] = {
    "names": lambda properties: str(properties.name),
    "uuids": lambda properties: str(properties.uuid),
    "pci_ids": _pci_id,
    "capabilities": lambda properties: f"{properties.major}.{properties.minor}",
    "total_memory": lambda properties: int(properties.total_memory),
}


def _driver() -> str | None:
    """The NVIDIA driver's version, without asking NVML."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else None
