"""The accelerator's memory in parts, by a made-up allocator."""

import pytest
import torch

from autotune.probe.memory import LARGEST_CONTEXT, DeviceMemory
from autotune.probe.sources import RING, _most_in_ring

GIB = 1024**3
TOTAL = 80 * GIB


class Allocator:
    """Counts as an accelerator's allocator does."""

    def __init__(self):
        self.outside = GIB // 2
        self.allocated = self.reserved = self.retries = 0
        self.peaks = {"allocated": 0, "reserved": 0}
        self.looks = 0
        self.share = None

    def take(self, allocated, reserved=None):
        self.allocated = allocated
        self.reserved = max(self.reserved, reserved or allocated)
        self.peaks["allocated"] = max(self.peaks["allocated"], self.allocated)
        self.peaks["reserved"] = max(self.peaks["reserved"], self.reserved)

    def memory_stats(self, device):
        self.looks += 1
        return {
            "allocated_bytes.all.peak": self.peaks["allocated"],
            "reserved_bytes.all.peak": self.peaks["reserved"],
            "reserved_bytes.all.current": self.reserved,
            "num_alloc_retries": self.retries,
        }

    def reset_peak_memory_stats(self, device):
        self.peaks = {"allocated": self.allocated, "reserved": self.reserved}

    def get_memory_info(self, device):
        return TOTAL - self.outside - self.reserved, TOTAL

    def set_per_process_memory_fraction(self, fraction, device):
        self.share = fraction


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    for name in ("memory_stats", "reset_peak_memory_stats", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, name, getattr(made, name))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", made.set_per_process_memory_fraction
    )
    return made


@pytest.fixture
def device():
    return torch.device("cuda", 0)


def test_the_peak_covers_the_first_steps_and_leaves_the_rings_surplus_out(allocator, device):
    memory = DeviceMemory(device, None)
    allocator.take(8 * GIB, 10 * GIB)
    allocator.take(2 * GIB)
    memory.begin_window()
    allocator.reserved = 0
    allocator.reset_peak_memory_stats(device)  # as the user's own code may do
    allocator.take(3 * GIB)
    facts = memory.facts(GIB)
    assert facts["allocated_bytes"] == 7 * GIB
    assert facts["reserved_bytes"] == 9 * GIB
    assert facts["memory_bytes"] == 9 * GIB + facts["other_bytes"]


def test_context_and_libraries_are_ours_and_the_rest_is_anothers(allocator, device):
    allocator.outside = LARGEST_CONTEXT + 4 * GIB
    memory = DeviceMemory(device, None)
    allocator.take(2 * GIB)
    allocator.outside += GIB // 4  # a library is loaded
    facts = memory.facts(0)
    assert facts["foreign_bytes"] == 4 * GIB
    assert facts["other_bytes"] == LARGEST_CONTEXT + GIB // 4


def test_only_the_windows_retries_count(allocator, device):
    memory = DeviceMemory(device, None)
    allocator.retries = 3
    memory.begin_window()
    allocator.retries = 5
    assert memory.facts(0)["alloc_retries"] == 2


def test_the_allocator_refuses_beyond_its_share_and_the_surplus(allocator, device):
    memory = DeviceMemory(device, 0.5)
    assert allocator.share == 0.5
    memory.allow(8 * GIB)
    assert allocator.share == pytest.approx(0.6)
    DeviceMemory(device, 0.9).allow(TOTAL)
    assert allocator.share == 1.0


def test_an_accelerator_that_tells_nothing_gives_no_numbers(monkeypatch, device):
    def cannot(*_):
        raise RuntimeError("not implemented for this backend")

    for name in ("memory_stats", "reset_peak_memory_stats", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, name, cannot)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", cannot)
    memory = DeviceMemory(device, 0.5)
    memory.begin_window()
    assert set(memory.facts(0).values()) == {None}


def test_the_cpu_has_no_allocator_to_ask():
    memory = DeviceMemory(torch.device("cpu"), 0.5)
    memory.begin_window()
    assert memory.facts(0) == {}


def test_a_ring_shrinks_where_its_batches_are_large():
    assert _most_in_ring(TOTAL, 1024) == RING
    assert _most_in_ring(TOTAL, TOTAL // 100) == 3
    assert _most_in_ring(TOTAL, TOTAL // 2) == 1
    assert _most_in_ring(None, TOTAL) == RING
