"""Facts made up for tests: machines, models, measurements and rows."""

from dataclasses import replace

from autotune.knobs import KNOBS
from autotune.request import Choice, Request
from autotune.space import Goal, resolve
from autotune.types import (
    Block,
    Config,
    Machine,
    Measurement,
    Sink,
    Source,
    Stage,
    Trial,
    WorkloadFacts,
)

GIB = 1024**3

CPU = Machine(
    cpus=8,
    cpu_limited_by="the machine's CPUs",
    memory_bytes=32 * GIB,
    shm_bytes=8 * GIB,
    default_threads=8,
)
HOPPER = replace(CPU, device="cuda:0", devices=("made up",), capability=(9, 0))
VOLTA = replace(HOPPER, capability=(7, 0))

FACTS = WorkloadFacts(
    parameters=1000,
    parameter_bytes=4000,
    dataset_len=100_000,
    sample_bytes=256.0,
    sample_s=1e-4,
    delivered_batch=32.0,
    stock=512,
    dtype="float32",
    batch_norm=False,
    exact_split=True,
    default_threads=8,
)

EVERYTHING = Request({name: Choice(None) for name in KNOBS if name != "parallel.mode"})
"""What the default space asks for."""


def asking(**lists):
    """A request: `loader__num_workers=(0, 2)` lists values, None is `auto`."""
    choices = {name.replace("__", "."): Choice(values) for name, values in lists.items()}
    return Request({name: choices[name] for name in KNOBS if name in choices})


def space(request=EVERYTHING, current=None, goal=None, machine=CPU, facts=FACTS):
    return resolve(request, current, goal or Goal(size=None), machine, facts)


def measurement(rate=100.0, *, blocks=12, noise=0.0, samples=1000, **changes):
    """A steady window at so many samples/s, its blocks alternating by the noise."""
    made = tuple(
        Block(
            seconds=samples / rate * (1 + noise * (-1) ** turn),
            consumed=samples,
            produced=samples,
            wait_s=0.0,
            steps=10,
        )
        for turn in range(blocks)
    )
    fields = {"stopped": "narrow", "batches": 10 * blocks, "steps": 10 * blocks}
    return Measurement(blocks=made, **{**fields, "optimizer_steps": 10 * blocks, **changes})


def trial(config, rate=100.0, *, stage=Stage.VERIFY, turn=0, failure=None, **changes):
    """An end-to-end row, ok at so many samples/s unless it failed."""
    return Trial(
        number=0,
        config=config if isinstance(config, Config) else Config(config),
        stage=stage,
        source=Source.LOADER,
        sink=Sink.TRAIN,
        measurement=None if failure else measurement(rate, **changes),
        failure=failure,
        probe_s=1.0,
        round=turn,
    )


def finals(config, rates, **changes):
    """Final rows, one a round."""
    return [
        trial(config, rate, stage=Stage.FINAL, turn=turn, **changes)
        for turn, rate in enumerate(rates)
    ]


class Listener:
    """Keeps what a run tells its user."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def begins(self, state):
        pass

    def asks(self, ask, left_s):
        pass

    def row(self, trial, run):
        pass
