"""NVML through the real bindings, on a library made of a C file that answers as a test says.

Every script here runs in a process of its own, which finds it where the driver's would be.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from autotune.telemetry import Telemetry
from autotune.telemetry.fields import FIELDS, RARELY

SHIM = Path(__file__).with_name("nvml_shim.c")
NOT_SUPPORTED, LOST, RESET_REQUIRED, MISMATCH = 3, 15, 16, 18
A, B = (f"{digit * 8}-aaaa-bbbb-cccc-{digit * 12}" for digit in "12")
PCI_A, PCI_B = "00000000:17:00.0", "00000000:65:00.0"
TWO = (
    "count 2",
    *(f"0.uuid GPU-{A}", f"0.pci {PCI_A}", "0.total 40e9", "0.name First"),
    *(f"1.uuid GPU-{B}", f"1.pci {PCI_B}", "1.total 80e9", "1.name Second"),
)
ONE = ("count 1", f"0.uuid GPU-{A}", f"0.pci {PCI_A}")
FUNCTIONS = sorted({name for row in FIELDS for way in row.ways for name in way.functions})

PREAMBLE = """
import dataclasses, json, os, sys, time
from pathlib import Path
from autotune import readings, telemetry
from autotune.telemetry import Telemetry, fields, meter, survey, tenants, watch

watch.TICK_S, meter.PAIR_S, fields.PAIR_S = 0.02, 0.01, 0.01
telemetry.LOOK_S, telemetry.PASSING_S = 0.02, 0.1
A, B, PCI_A, PCI_B = {names!r}

def shim(*lines, base={base!r}):
    "Let the library answer so from now on; the first line about something holds."
    part = Path(os.environ["NVML_SHIM"] + ".part")
    part.write_text("\\n".join([*lines, *base, "least_pair_ms 5"]))
    part.replace(os.environ["NVML_SHIM"])

def facts(*uuids, **changes):
    "What a child process would report of these devices."
    return {{"type": "cuda", "count": len(uuids), "uuids": list(uuids), **changes}}

def seen(telemetry, seconds=0.3, indices=(0,), before_s=0.0):
    "The readings of a window, made to begin earlier than the watch did where that is wished."
    with telemetry.watch(indices) as watching:
        time.sleep(0.1)
        start_ns = time.time_ns()
        time.sleep(seconds)
        end_ns = time.time_ns()
        time.sleep(0.1)
    return watching.readings(start_ns - int(before_s * 1e9), end_ns)

def plain(reading):
    return dataclasses.asdict(reading)

shim()
answer = {{}}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The made-up libnvidia-ml.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to build the made-up NVML with")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(SHIM), "-lm"]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def run(library, tmp_path):
    """Runs a script beside the library and returns what it left in `answer`."""

    def run(script, base=ONE, folder=None):
        preamble = PREAMBLE.format(names=(A, B, PCI_A, PCI_B), base=base)
        code = f"{preamble}\n{textwrap.dedent(script)}\nprint(json.dumps(answer))"
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(folder or library.parent),
            "NVML_SHIM": str(tmp_path / "nvml.txt"),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def without(library, folder, *symbols):
    """A copy of the library in which these symbols cannot be found, as in an old driver's."""
    folder.mkdir()
    content = library.read_bytes()
    for symbol in symbols:
        name = f"\0{symbol}\0".encode()
        assert name in content, symbol
        content = content.replace(name, b"\0x" + name[2:])
    (folder / library.name).write_bytes(content)
    return folder


# --- every field --------------------------------------------------------------------------------


def given(row):
    return set(row.gives)


def without_these(failing):
    """The rows that cannot be read where these functions fail."""
    return [row for row in FIELDS if not any(works(way, failing) for way in row.ways)]


def works(way, failing):
    left = set(way.functions) - failing
    return bool(left) if way.any_of else left == set(way.functions)


def test_where_everything_can_be_read_everything_is(run):
    found = run(
        """
        readings.LEAST_ENERGY_S = 0.1
        own = f"processes {os.getpid()}:5e9"
        shim(own, "tick_ms 10", "busy 1:3", "gpm20 100", "gpm21 900")
        watched = Telemetry.open(facts(A))
        answer["unread"] = watched.unread()
        answer["exact"] = plain(seen(watched, 0.5)[0])
        answer["earlier"] = plain(seen(watched, 0.1, before_s=2)[0])
        watched.close()
        """
    )
    exact, earlier = found["exact"], found["earlier"]
    assert found["unread"] == []
    expected = {
        "index": 0,
        "sm_active_pct": 2.0,  # the library tells each metric's number
        "sm_occupancy_pct": 3.0,
        "tensor_active_pct": 5.0,
        "dram_active_pct": 10.0,
        "pcie_tx_mib_per_s": 100.0,
        "pcie_rx_mib_per_s": 900.0,
        "sm_clock_mhz": 1980,
        "sm_clock_first_mhz": 1980,
        "sm_clock_later_mhz": 1980,
        "memory_clock_mhz": 2619,
        "event_reasons": 4,
        "temperature_c": 61,
        "used_bytes": 4_000_000,
        "used_before_bytes": 4_000_000,
        "process_bytes": 5_000_000_000,
        "others": 0,
        "others_bytes": 0,
        "others_util_pct": 3.0,
        "estimated": False,
    }
    assert {name: exact[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert exact["uuid"] == f"GPU-{A}"
    assert exact["power_w"] == pytest.approx(300, rel=0.15)
    assert exact["energy_j"] == pytest.approx(300 * 0.5, rel=0.3)
    assert (earlier["gpu_util_pct"], earlier["memory_util_pct"]) == (80.0, 40.0)
    named = {name for row in FIELDS for name in row.gives}
    assert [name for name in named if exact[name] is None and earlier[name] is None] == []


def test_each_field_that_is_not_supported_is_missing_alone(run):
    cases = {row.name: sorted({f for way in row.ways for f in way.functions}) for row in FIELDS}
    found = run(
        f"""
        readings.LEAST_ENERGY_S = 0.05
        for name, functions in {cases!r}.items():
            own = f"processes {{os.getpid()}}:5e9"
            shim(own, "tick_ms 1", *(f"fail {{one}} {NOT_SUPPORTED}" for one in functions))
            watched = Telemetry.open(facts(A))
            with watched.watch([0]) as watching:
                time.sleep(0.03)
                start_ns = time.time_ns()
                time.sleep(0.28)
                end_ns = time.time_ns()
            exact = watching.readings(start_ns, end_ns)[0]
            earlier = watching.readings(start_ns - 2 * 10**9, end_ns)[0]
            told = {{
                key for key, value in (*plain(exact).items(), *plain(earlier).items())
                if value is not None
            }}
            answer[name] = {{"unread": watched.unread(), "told": sorted(told)}}
            watched.close()
        """
    )
    for name, functions in cases.items():
        dead = without_these(set(functions))
        assert name in [row.name for row in dead]
        assert found[name]["unread"] == [row.title for row in dead], name
        missing = {given for row in dead for given in row.gives}
        # With a counter or power alone, the other one follows from it.
        missing -= {"energy_j"} if "power_w" not in missing else set()
        missing -= {"power_w"} if "energy_j" not in missing else set()
        alive = [row for row in FIELDS if row not in dead]
        often = [
            row
            for row in alive
            if any(way.every < RARELY and works(way, set(functions)) for way in row.ways)
        ]
        expected = {given for row in often for given in row.gives}
        told = set(found[name]["told"])
        assert not told & missing - {"others_bytes"}, name
        assert expected <= told, name


def test_each_function_that_a_driver_lacks_costs_no_other_field(run, library, tmp_path):
    folders = {name: str(without(library, tmp_path / name, name)) for name in FUNCTIONS}
    found = run(
        f"""
        import ctypes, pynvml
        shim("samples1 30:50", "samples2 30:50")
        for name, folder in {folders!r}.items():
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml.nvmlLib = ctypes.CDLL(folder + "/libnvidia-ml.so.1")
            watched = Telemetry.open(facts(A))
            answer[name] = [watched.problem, watched.unread()]
            watched.close()
        """
    )
    for name in FUNCTIONS:
        problem, unread = found[name]
        assert problem == ""
        assert unread == [row.title for row in without_these({name})], name


def test_each_gpm_metric_is_missing_alone(run):
    found = run(
        f"""
        for metric in meter.GPM_METRICS:
            shim(f"without {{metric}} 1", "fail nvmlDeviceGetPcieThroughput {NOT_SUPPORTED}")
            watched = Telemetry.open(facts(A))
            answer[metric] = watched.unread()
            watched.close()
        """
    )
    titles = ["SM activity", "SM occupancy", "tensor core activity", "DRAM bandwidth"]
    titles += ["PCIe sent", "PCIe received"]
    assert list(found.values()) == [[title] for title in titles]


# --- drivers, and machines that have less --------------------------------------------------------


def test_without_a_driver_nothing_is_read_and_nothing_breaks(run, tmp_path):
    found = run(
        """
        watched = Telemetry.open(facts(A))
        answer["problem"], answer["picked"] = watched.problem, watched.pick()
        answer["notes"] = watched.notes
        answer["readings"] = seen(watched, 0.01)
        answer["tenants"], answer["reads"] = watched.tenants(0), watched.reads(0, "energy_j")
        watched.close()
        answer["survey"] = survey().problem
        """,
        folder=tmp_path,
    )
    assert "NVML Shared Library Not Found" in found["problem"]
    assert found["notes"] == [f"GPU columns stay empty: {found['problem']}"]
    assert (found["picked"], found["readings"], found["tenants"]) == (0, [], "")
    assert found["reads"] is False
    assert found["survey"] == found["problem"]


@pytest.mark.parametrize(("code", "told"), [(MISMATCH, "mismatch"), (9, "Driver Not Loaded")])
def test_a_driver_that_does_not_answer_is_told_once(run, code, told):
    found = run(
        f"""
        shim("fail nvmlInitWithFlags {code}")
        watched = Telemetry.open(facts(A))
        watched.pick()
        answer["notes"], answer["survey"] = watched.notes, survey().problem
        """
    )
    (note,) = found["notes"]
    assert told in note
    assert told in found["survey"]


def test_an_old_library_cannot_even_be_opened(run, library, tmp_path):
    old = without(library, tmp_path / "old", "nvmlInitWithFlags")
    found = run("answer['problem'] = Telemetry.open(facts(A)).problem", folder=old)
    assert "Function Not Found" in found["problem"]


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"type": "cpu"}, ""),
        ({}, ""),
        ({"type": "xpu", "count": 1}, "only NVIDIA GPUs are read, not devices of type xpu"),
    ],
)
def test_other_devices_are_not_looked_for(facts, problem):
    telemetry = Telemetry.open(facts)
    assert (telemetry.problem, telemetry.gpus, telemetry.unread()) == (problem, (), [])
    with telemetry.watch([0]) as watch:
        pass
    assert watch.readings(1, 2) == ()
    assert telemetry.await_release(watch, lambda: None)
    telemetry.close()


LESS = {
    "jetson": {*FUNCTIONS, "nvmlDeviceGetUUID", "nvmlDeviceGetHandleByUUID"},
    "vgpu": {
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetPcieThroughput",
        "nvmlGpmSampleGet",
        "nvmlDeviceGetClockInfo",
    },
    "wsl": {
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetCurrentClocksEventReasons",
    },
    "unified memory": {"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"},
}


@pytest.mark.parametrize("kind", LESS)
def test_a_device_that_tells_less_is_told_about_once_and_read_all_the_same(run, kind):
    failing = LESS[kind]
    found = run(
        f"""
        shim(*(f"fail {{name}} {NOT_SUPPORTED}" for name in {sorted(failing)!r}), "total 0")
        watched = Telemetry.open(facts(A, pci_ids=[None]))
        answer["problem"], answer["picked"] = watched.problem, watched.pick()
        answer["notes"], answer["name"] = watched.notes, watched.gpus[0].name
        with watched.watch([0]) as watching:
            time.sleep(0.1)
        answer["lost"], answer["free"] = watching.lost, watched.await_release(watching, dir)
        answer["tenants"] = watched.tenants(0)
        """
    )
    dead = [row.title for row in without_these(failing) if row.name != "used_bytes"]
    (note,) = found["notes"]
    assert set(dead) <= set(note.removeprefix("not read from this GPU: ").split(", "))
    assert found["name"] == "Made Up"
    assert (found["problem"], found["lost"], found["tenants"]) == ("", "", "")
    assert found["free"] is True


# --- which device is which ------------------------------------------------------------------------


def test_devices_are_found_whatever_they_are_called_and_however_they_are_ordered(run):
    found = run(
        """
        asked = {
            "as they are": facts(A, B),
            "reversed": facts(B, A),
            "the second alone": facts(B),
            "twice the same": facts(B, B),
            "with its prefix": facts("GPU-" + B),
            "by address": facts(None, pci_ids=[PCI_B]),
            "unknown name, known address": facts("x" * 36, pci_ids=[PCI_B]),
            "no address list": facts(A, pci_ids=None),
            "filled up with zeros": facts(B + "\\0\\0"),
            "cut at a zero": facts(B[:6]),
            "cut within": facts(B[:6] + "\\0\\0garbage"),
            "bytes": facts(B.encode()),
            "none at all": facts(),
            "nothing known": facts(None),
            "one of two": facts(None, A),
        }
        for name, told in asked.items():
            watched = Telemetry.open(told)
            answer[name] = [[gpu.index, gpu.name, gpu.total_bytes] for gpu in watched.gpus]
            watched.close()
        """,
        base=TWO,
    )
    first, second = ["First", 40e9], ["Second", 80e9]
    assert found == {
        "as they are": [[0, *first], [1, *second]],
        "reversed": [[0, *second], [1, *first]],
        "the second alone": [[0, *second]],
        "twice the same": [[0, *second], [1, *second]],
        "with its prefix": [[0, *second]],
        "by address": [[0, *second]],
        "unknown name, known address": [[0, *second]],
        "no address list": [[0, *first]],
        "filled up with zeros": [[0, *second]],
        "cut at a zero": [[0, *second]],
        "cut within": [[0, *second]],
        "bytes": [[0, *second]],
        "none at all": [],
        "nothing known": [],
        "one of two": [[1, *first]],
    }


def test_each_device_is_read_by_itself_and_once(run):
    found = run(
        """
        shim("0.degrees 50", "1.degrees 70")
        watched = Telemetry.open(facts(B, A, B))
        told = seen(watched, indices=(0, 1, 2))
        answer["told"] = [[one.index, one.uuid, one.temperature_c] for one in told]
        """,
        base=TWO,
    )
    assert found["told"] == [[0, f"GPU-{B}", 70], [1, f"GPU-{A}", 50]]


@pytest.mark.parametrize("prefix", ["", "MIG-"])
def test_a_mig_slice_tells_its_own_and_not_what_the_whole_gpu_uses(run, prefix):
    found = run(
        f"""
        readings.LEAST_ENERGY_S = 0.05
        shim("0.mig 1", "1.uuid MIG-" + B, "1.total 10e9", "1.gpm2 33", "0.gpm2 99")
        watched = Telemetry.open(facts({prefix!r} + B))
        answer["mig"], answer["unread"] = watched.gpus[0].mig, watched.unread()
        answer["told"] = plain(seen(watched, before_s=2)[0])
        answer["total"] = watched.gpus[0].total_bytes
        """
    )
    assert found["mig"]
    assert found["total"] == 10e9
    told = found["told"]
    for name in ("energy_j", "power_w", "gpu_util_pct", "others_util_pct"):
        assert told[name] is None, name
    assert {"energy", "power"} <= set(found["unread"])
    assert told["sm_active_pct"] == pytest.approx(33)
    assert (told["sm_clock_mhz"], told["temperature_c"]) == (1980, 61)


def test_a_slice_that_is_known_by_its_address_only_tells_no_energy(run):
    found = run(
        """
        shim("0.mig 1")
        watched = Telemetry.open(facts(B, pci_ids=[PCI_A]))
        answer["mig"], answer["gpm"] = watched.gpus[0].mig, watched.gpus[0].gpm
        answer["reads"] = watched.reads(0, "energy_j", "power_w")
        """
    )
    assert found == {"mig": True, "reads": False, "gpm": False}


# --- exactly the window ---------------------------------------------------------------------------


def test_energy_is_that_of_the_window(run):
    found = run(
        """
        readings.LEAST_ENERGY_S = 0.5
        shim("tick_ms 20", "watts 200")
        watched = Telemetry.open(facts(A))
        long, short = seen(watched, 1.0)[0], seen(watched, 0.3)[0]
        shim("fail nvmlDeviceGetTotalEnergyConsumption 3", "watts 200")
        old = Telemetry.open(facts(A))
        estimated = seen(old, 0.3, before_s=2)[0]
        answer.update(long=plain(long), short=plain(short), estimated=plain(estimated))
        """
    )
    assert found["long"]["power_w"] == pytest.approx(200, rel=0.06)
    assert found["long"]["energy_j"] == pytest.approx(200 * 1.0, rel=0.2)
    assert not found["long"]["estimated"]
    assert found["short"]["energy_j"] is None
    assert found["estimated"]["power_w"] == pytest.approx(200)
    assert found["estimated"]["estimated"]


def test_utilisation_comes_from_the_drivers_own_samples_inside_the_window(run):
    found = run(
        """
        shim("util 7", "samples1 9000:0 5000:0 60:90 40:94 20:92", "samples2 9000:0 50:30 30:30")
        watched = Telemetry.open(facts(A))
        answer["told"] = plain(seen(watched, 0.6)[0])
        shim("util 7", "samples1 90000:1 80000:2 70000:3")  # another clock, or long ago
        other = Telemetry.open(facts(A))
        answer["stale"] = plain(seen(other, 0.3, before_s=2)[0])
        answer["too short"] = plain(seen(other, 0.01)[0])
        """
    )
    assert 90 <= found["told"]["gpu_util_pct"] <= 94
    assert found["told"]["memory_util_pct"] == 30
    assert found["stale"]["gpu_util_pct"] == 7
    assert found["too short"]["gpu_util_pct"] is None


def test_gpm_pairs_inside_the_window_are_far_enough_apart_and_add_up(run):
    found = run(
        """
        watch.TICK_S = meter.PAIR_S = fields.PAIR_S = 0.06
        shim("gpm2 90", "least_pair_ms 55")
        watched = Telemetry.open(facts(A))
        with watched.watch([0]) as watching:
            time.sleep(0.3)
            start_ns = time.time_ns()
            shim("gpm2 30", "least_pair_ms 55")
            time.sleep(0.6)
            middle_ns = time.time_ns()
            shim("gpm2 60", "least_pair_ms 55")
            time.sleep(0.6)
            end_ns = time.time_ns()
        windows = {"first": (start_ns, middle_ns), "both": (start_ns, end_ns)}
        for name, edges in windows.items():
            answer[name] = watching.readings(*edges)[0].sm_active_pct
        """
    )
    assert found["first"] == pytest.approx(30, rel=0.25)
    assert found["both"] == pytest.approx(45, rel=0.15)


def test_lower_clocks_and_their_reasons_are_seen(run):
    found = run(
        """
        shim("sm_mhz 1900", "reasons 4")
        watched = Telemetry.open(facts(A))
        with watched.watch([0]) as watching:
            time.sleep(0.1)
            start_ns = time.time_ns()
            time.sleep(0.4)
            shim("sm_mhz 1500", "reasons 64")
            time.sleep(0.5)
            end_ns = time.time_ns()
        answer["told"] = plain(watching.readings(start_ns, end_ns)[0])
        """
    )
    told = found["told"]
    assert told["event_reasons"] == 64 | 4
    assert told["sm_clock_first_mhz"] > told["sm_clock_mhz"] > told["sm_clock_later_mhz"] >= 1500


# --- who else is there ----------------------------------------------------------------------------

NOBODY = 4_000_000_001
"""A process number that cannot be."""


def shared(run, script, base=ONE):
    return run(
        f"""
        from autotune.readings import is_contended
        NOBODY = {NOBODY}
        own = os.getpid()
        def told(*lines, later=()):
            shim(*lines)
            watched = Telemetry.open(facts(A))
            who = watched.tenants(0)
            with watched.watch([0]) as watching:
                if later:
                    shim(*later)
                time.sleep(0.05)
                start_ns = time.time_ns()
                time.sleep(0.25)
            one = watching.readings(start_ns, time.time_ns())[0]
            return [who, one.others, one.others_bytes, one.process_bytes, is_contended(one)]
        {script}
        """,
        base,
    )


def test_other_processes_are_told_from_our_own(run):
    found = shared(
        run,
        """
        answer["nobody"] = told()
        answer["ours"] = told(later=[f"processes {own}:5e9"])
        answer["visible"] = told("processes 1:3e9", "used 3e9",
                                 later=[f"processes 1:3e9 {own}:5e9", "used 8e9"])
        answer["came later"] = told(later=[f"processes 1:3e9 {own}:5e9"])
        answer["untold"] = told("processes 1:?")
        answer["ours, under a number of the host"] = told(later=[f"processes {NOBODY}:5e9"])
        answer["there before, under such a number"] = told(f"processes {NOBODY}:3e9")
        answer["busy"] = told("busy 1:30")
        answer["invisible"] = told("used 7e9")
        lists = [f"fail nvmlDeviceGetComputeRunningProcesses_v{version} 3" for version in (2, 3)]
        answer["no list"] = told("used 7e9", *lists)
        """,
    )
    assert found == {
        "nobody": ["", 0, 0, None, False],
        "ours": ["", 0, 0, 5e9, False],
        "visible": ["1 other process holds 2.8 GiB", 1, 3e9, 5e9, True],
        "came later": ["", 1, 3e9, 5e9, True],
        "untold": ["1 other process holds memory", 1, 0, None, True],
        "ours, under a number of the host": ["", 0, 0, 5e9, False],
        "there before, under such a number": ["1 other process holds 2.8 GiB", 1, 3e9, None, True],
        "busy": ["", 0, 0, None, True],
        "invisible": ["another process may hold 6.5 GiB", 0, 7e9, None, True],
        "no list": ["another process may hold 6.5 GiB", None, 7e9, None, True],
    }


def test_what_is_just_ending_is_no_tenant(run):
    found = run(
        f"""
        import threading
        telemetry.PASSING_S = 5.0
        shim("processes {NOBODY}:5e8")
        watched = Telemetry.open(facts(A))
        threading.Timer(0.2, shim).start()
        answer["who"] = watched.tenants(0)
        """
    )
    assert found["who"] == ""


def test_devices_of_others_are_left_out_and_that_is_said(run):
    found = run(
        """
        def picked(*lines):
            shim(*lines)
            watched = Telemetry.open(facts(A, B))
            index = watched.pick()
            return [index, watched.notes]
        answer["free"] = picked()
        answer["first busy"] = picked("0.processes 1:3e9")
        answer["both busy"] = picked("processes 1:3e9")
        answer["first lost"] = picked("0.gone 1")
        """,
        base=TWO,
    )
    holds = "1 other process holds 2.8 GiB"
    assert found["free"] == [0, []]
    assert found["first busy"] == [1, [f"left out: GPU 0, where {holds}"]]
    assert found["first lost"] == [1, ["left out: GPU 0, where NVML says: GPU is lost"]]
    index, (note,) = found["both busy"]
    assert index == 0
    assert note == (
        f"no GPU is free, so figures may be too low: GPU 0, where {holds}; GPU 1, where {holds}"
    )


def test_memory_that_comes_back_is_waited_for_and_what_does_not_counts_as_anothers(run):
    found = run(
        """
        import threading
        from autotune.readings import is_contended
        asked = []
        watched = Telemetry.open(facts(A))
        with watched.watch([0]) as watching:
            shim("used 9e9")
            time.sleep(0.1)
        threading.Timer(0.3, shim).start()
        started = time.monotonic()
        answer["back"] = watched.await_release(watching, lambda: asked.append(1))
        answer["asked"] = len(asked)
        with watched.watch([0]) as watching:
            shim(f"processes {os.getpid()}:9e9", "used 9e9")
            time.sleep(0.2)
        shim("processes 1:9e9", "used 9e9")  # somebody else took what ours gave back
        answer["gone"] = watched.await_release(watching, dir)
        shim()
        telemetry.RELEASE_S = 0.2
        with watched.watch([0]) as watching:
            shim("used 9e9")
        answer["never"] = watched.await_release(watching, dir)
        answer["next"] = [is_contended(one) for one in seen(watched)]
        shim()
        answer["after that"] = [is_contended(one) for one in seen(watched)]
        """
    )
    assert found["back"] is True
    assert found["asked"] >= 2
    assert found["gone"] is True
    assert found["never"] is False
    assert found["next"] == [True]
    assert found["after that"] == [False]


# --- a GPU that goes away -------------------------------------------------------------------------


@pytest.mark.parametrize("code", [LOST, RESET_REQUIRED])
def test_a_lost_gpu_is_noticed_while_the_probe_runs(run, code):
    found = run(
        f"""
        watched = Telemetry.open(facts(A))
        answer["before"] = seen(watched)[0].sm_clock_mhz
        with watched.watch([0]) as watching:
            start_ns = time.time_ns()
            time.sleep(0.2)
            answer["yet"], end_ns = watching.lost, time.time_ns()
            shim("fail nvmlDeviceGetClockInfo {code}")
            deadline = time.monotonic() + 5
            while not watching.lost and time.monotonic() < deadline:
                time.sleep(0.01)
            answer["lost"] = watching.lost
        answer["kept"] = watching.readings(start_ns, end_ns)[0].sm_clock_mhz
        answer["free"] = watched.await_release(watching, dir)
        shim()
        with watched.watch([0]) as again:
            pass
        answer["again"] = again.lost
        watched.close()
        """
    )
    assert found["yet"] == ""
    assert found["lost"].startswith("GPU 0 (Made Up): GPU ")
    assert found["kept"] == found["before"] == 1980
    assert found["again"] == found["lost"]
    assert found["free"] is True


def test_a_gpu_that_is_lost_at_any_call_never_raises(run):
    found = run(
        """
        import pynvml
        for call in range(0, 60, 3):
            # The library counts its calls from the start: let it be lost so many after now.
            shim(f"lost {call}")
            watched = Telemetry.open(facts(A))
            with watched.watch([0]) as watching:
                time.sleep(0.01)
            answer[call] = [bool(watched.problem), bool(watching.lost), watched.tenants(0)]
            survey()
            watched.close()
        """
    )
    assert all(problem or lost for problem, lost, _ in found.values())


def test_where_nvml_hangs_the_run_goes_on_without_it(run):
    found = run(
        """
        watch.ANSWER_S = 0.1
        watched = Telemetry.open(facts(A))
        with watched.watch([0]) as watching:
            shim("hang nvmlDeviceGetClockInfo 3000")
            time.sleep(0.1)
        answer["stuck"], answer["readings"] = watching.stuck, watching.readings(1, time.time_ns())
        answer["free"], answer["problem"] = watched.await_release(watching, dir), watched.problem
        answer["next"] = seen(watched, 0.01)
        watched.close()
        """
    )
    assert found == {
        "stuck": True,
        "readings": [],
        "free": True,
        "problem": "NVML does not answer any more",
        "next": [],
    }


# --- doctor ---------------------------------------------------------------------------------------


def test_a_survey_tells_everything_of_every_gpu(run):
    found = run(
        """
        shim("1.gpm 0", "1.persistent 0", "1.processes 1:3e9", "1.used 3e9", "0.mig 1",
             "fail nvmlDeviceGetEnforcedPowerLimit 3")
        answer.update(dataclasses.asdict(survey()))
        """,
        base=TWO,
    )
    first, second = found["gpus"]
    assert (found["problem"], found["driver"], found["nvml"]) == ("", "550.54.15", "12.550.54")
    assert [first[name] for name in ("index", "name", "mig", "persistent")] == [
        0,
        "First",
        True,
        True,
    ]
    assert [second[name] for name in ("index", "name", "gpm", "persistent")] == [
        1,
        "Second",
        False,
        False,
    ]
    assert (second["memory_bytes"], second["used_bytes"]) == (80e9, 3e9)
    assert (first["others"], second["others"]) == ("", "1 other process holds 2.8 GiB")
    assert first["power_limit_w"] is None
    assert "SM activity" in second["unread"]
    assert second["readable"]["energy"] == "J"
    assert {*second["readable"], *second["unread"]} == {row.title for row in FIELDS}


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", FIELDS, ids=[row.name for row in FIELDS])
def test_the_name_says_the_unit(row):
    endings = {
        "%": "_pct", "J": "_j", "W": "_w", "MHz": "_mhz", "deg C": "_c", "MiB/s": "_mib_per_s",
        "bytes": "_bytes",
    }  # fmt: skip
    assert row.unit in ("bits", "processes") or row.name.endswith(endings[row.unit])
    assert row.name in row.gives
    assert row.title


# --- a real one -----------------------------------------------------------------------------------

BUSY = """
import json, time, torch
from autotune.probe.canary import device_facts, accelerator
print(json.dumps(device_facts(accelerator())), flush=True)
one = torch.randn(4096, 4096, device="cuda")
while True:
    one = torch.nn.functional.normalize(one @ one)
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/proc/driver/nvidia/version").exists(), reason="no NVIDIA driver")
def test_a_real_gpu_tells_that_it_is_busy():
    busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        telemetry = Telemetry.open(json.loads(busy.stdout.readline()))
        time.sleep(2)
        with telemetry.watch([0]) as watch:
            time.sleep(1)
            start_ns = time.time_ns()
            time.sleep(11)
            end_ns = time.time_ns()
            time.sleep(1)
        (reading,) = watch.readings(start_ns, end_ns)
        telemetry.close()
    finally:
        busy.kill()
        busy.communicate()
    assert watch.lost == ""
    told = {row.name for row in FIELDS if getattr(reading, row.name) is not None}
    assert "gpu_util_pct" not in told or reading.gpu_util_pct > 50
    assert "energy_j" not in told or 5 < reading.power_w < 2000
    assert {"gpu_util_pct", "used_bytes", "power_w"} & told
