"""What the process may use of the machine, read from made-up control groups."""

import os
from pathlib import Path

import psutil
import pytest

from autotune import machine as machine_module
from autotune.machine import cpus_granted, machine_of, memory_free, memory_granted

ALL = 16
MAXIMUM = psutil.virtual_memory().total

V2 = "0::/user/job\n"
V1 = "4:memory:/user/job\n3:cpu,cpuacct:/user/job\n1:name=systemd:/user/job\n"
HYBRID = V1 + "0::/user/job\n"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A machine of 16 CPUs whose control groups a test writes: `groups(membership, files)`."""
    monkeypatch.setattr(os, "cpu_count", lambda: ALL)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALL)), raising=False)
    monkeypatch.setattr(machine_module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_module, "MEMBERSHIP", tmp_path / "membership")

    def write(membership, files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, ALL),
        ({"user/job/cpu.max": "max 100000\n"}, ALL),
        ({"user/job/cpu.max": "200000 100000\n"}, 2),
        ({"user/job/cpu.max": "250000 100000\n"}, 3),  # two and a half keep three busy
        ({"user/job/cpu.max": "10000 100000\n"}, 1),
        ({"user/job/cpu.max": "max 100000\n", "user/cpu.max": "400000 100000\n"}, 4),
        ({"user/job/cpu.max": "800000 100000\n", "cpu.max": "400000 100000\n"}, 4),
        ({"user/job/cpu.max": "6400000 100000\n"}, ALL),
        ({"user/job/cpu.max": "rubbish\n"}, ALL),
        ({"user/job/cpu.max": ""}, ALL),
        ({"other/cpu.max": "100000 100000\n"}, ALL),
    ],
)
def test_the_least_quota_above_counts_in_version_2(groups, files, cpus):
    groups(V2, files)
    assert cpus_granted()[0] == cpus


def quota(us, period="100000"):
    return {"cpu.cfs_quota_us": f"{us}\n", "cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize("membership", [V1, HYBRID])
@pytest.mark.parametrize(
    ("own", "above", "cpus"),
    [
        (quota(-1), quota(-1), ALL),
        (quota(300000), quota(-1), 3),
        (quota(-1), quota(200000), 2),
        (quota(100000, "50000"), {}, 2),
        ({}, {}, ALL),
    ],
)
def test_the_least_quota_above_counts_in_version_1(groups, membership, own, above, cpus):
    files = {f"cpu,cpuacct/user/job/{name}": text for name, text in own.items()}
    files |= {f"cpu,cpuacct/user/{name}": text for name, text in above.items()}
    groups(membership, files)
    assert cpus_granted()[0] == cpus


def test_in_a_container_the_path_is_the_hosts_and_the_limit_is_at_the_root(groups):
    groups("0::/docker/0123abcd\n", {"cpu.max": "300000 100000\n", "memory.max": "1073741824\n"})
    assert cpus_granted()[0] == 3
    assert memory_granted() == 2**30


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (
            V2,
            {
                "user/job/memory.max": "4096\n",
                "user/job/memory.current": "3072\n",
                "user/job/memory.stat": "anon 2048\ninactive_file 512\nactive_file 512\n",
            },
        ),
        (
            V1,
            {
                "memory/user/job/memory.limit_in_bytes": "4096\n",
                "memory/user/job/memory.usage_in_bytes": "3072\n",
                "memory/user/job/memory.stat": "cache 1024\ntotal_inactive_file 512\n",
            },
        ),
    ],
)
def test_what_is_free_is_what_the_group_leaves_and_could_reclaim(groups, membership, files):
    groups(membership, files)
    assert memory_free() == 4096 - 3072 + 512


def test_without_a_limit_the_machines_memory_is_free(groups):
    groups(V2, {"user/job/memory.max": "max\n", "user/job/memory.current": "3072\n"})
    assert 0 < memory_free() <= MAXIMUM


def test_without_control_groups_the_machine_is_what_there_is(groups):
    assert cpus_granted() == (ALL, "the machine's CPUs")
    assert memory_granted() == MAXIMUM


@pytest.mark.parametrize(
    ("mask", "quota", "granted"),
    [
        (16, 16, (16, "the machine's CPUs")),
        (4, 16, (4, "CPU affinity")),
        (4, 4, (4, "CPU affinity")),
        (8, 3, (3, "the cgroup's CPU quota")),
        (1, 1, (1, "CPU affinity")),
    ],
)
def test_the_smaller_of_mask_and_quota_limits(groups, monkeypatch, mask, quota, granted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)), raising=False)
    groups(V2, {"user/job/cpu.max": f"{quota * 100000} 100000"})
    assert cpus_granted() == granted


def test_where_there_is_no_mask_the_machine_has_all_its_cpus(groups, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpus_granted() == (ALL, "the machine's CPUs")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpus_granted()[0] == 1


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        (V2, {"user/job/memory.max": "max\n", "user/memory.max": "2147483648\n"}, 2**31),
        (V2, {"user/job/memory.max": "1073741824\n", "user/memory.max": "2147483648\n"}, 2**30),
        (V1, {"memory/user/job/memory.limit_in_bytes": "1073741824\n"}, 2**30),
        (V1, {"memory/user/job/memory.limit_in_bytes": "9223372036854771712\n"}, MAXIMUM),
    ],
)
def test_the_least_memory_limit_counts(groups, membership, files, limit):
    groups(membership, files)
    assert memory_granted() == limit


def test_this_machine_can_be_read():
    cpus, why = cpus_granted()
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    assert why
    assert 0 < memory_granted() <= MAXIMUM


@pytest.mark.parametrize(
    ("found", "device", "capability"),
    [
        ({"type": "cpu"}, "cpu", (0, 0)),
        ({}, "cpu", (0, 0)),
        ({"type": "cuda", "names": ["A", "B"], "capabilities": ["9.0", "9.0"]}, "cuda:0", (9, 0)),
        ({"type": "mps", "names": ["M"]}, "mps:0", (0, 0)),
    ],
)
def test_the_device_is_what_a_child_found(found, device, capability):
    known = machine_of({**found, "default_threads": 3, "driver": "550.54.15"})
    assert (known.device, known.capability) == (device, capability)
    assert known.on_cpu == (device == "cpu")
    assert (known.default_threads, known.driver_major) == (3, "550")
    assert known.torch
    assert Path("/dev/shm").exists() == (known.shm_bytes > 0)


def test_another_device_than_the_first_may_be_used():
    found = {"type": "cuda", "names": ["A", "B"], "capabilities": ["7.0", "9.0"]}
    known = machine_of(found, 1)
    assert (known.device, known.capability, known.devices) == ("cuda:1", (9, 0), ("A", "B"))
    assert machine_of({"type": "cuda", "names": ["A"]}, 1).capability == (0, 0)
