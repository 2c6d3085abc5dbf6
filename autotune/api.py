"""The same engine for notebooks: tune a model file, load a run, look at what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import driver, store
from autotune.diagnosis import diagnose
from autotune.errors import OptionError, ResumeError
from autotune.exporters import EXPORTERS
from autotune.options import Options
from autotune.pareto import Answer, front, pool
from autotune.report import verdict
from autotune.runfolder import new_run
from autotune.state import RunState, load_state
from autotune.types import Config, Estimate, Finding

if TYPE_CHECKING:
    import pandas as pd

    from autotune.scene import Ask
    from autotune.types import Trial


class Run:
    """A finished or interrupted run, as its folder tells it."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {len(self._state.trials)} trials)"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._state.folder

    @property
    def trials(self) -> pd.DataFrame:
        """One row per probe or refusal; times in s, memory in GiB, empty where not read."""
        return store.table(self._state.trials)

    @property
    def pareto(self) -> pd.DataFrame:
        """The configs that no other one clearly beats, repeats pooled."""
        points = list(pool(self._state.trials).values())
        return store.pareto_table(front(points, self._state.checked.objectives))

    @property
    def best(self) -> pd.Series[float]:
        """The answer's config with its pooled figures."""
        return self._pooled(self._answer.config)

    @property
    def baseline(self) -> pd.Series[float]:
        """The user's own config with its pooled figures."""
        return self._pooled(self._state.baseline)

    @property
    def keep(self) -> bool:
        """Whether the answer is to keep the user's config."""
        return self._answer.keep

    @property
    def speedup(self) -> Estimate | None:
        """How many times faster than the baseline; None where that failed."""
        return self._answer.speedup

    @property
    def diagnosis(self) -> list[Finding]:
        """What holds the user's config back, with the evidence."""
        return diagnose(self._state.trials, self._state.baseline)

    @property
    def path(self) -> pd.DataFrame:
        """The measured steps from the baseline to the answer: device busy (%), samples/s."""
        import pandas as pd

        rows = [
            {
                "step": row.title,
                "device_busy_pct": row.busy_pct,
                "samples_per_s": row.point.speed.value if row.point else None,
            }
            for row in verdict.path_rows(self._state)
        ]
        return pd.DataFrame(rows)

    @property
    def verdict(self) -> str:
        """What the command line prints at the end of the run."""
        return verdict.verdict(self._state)

    def overrides(self, format: str = "hydra") -> str:
        """The answer in another library's words.

        Raises:
            OptionError: If there is no such format.
        """
        if format not in EXPORTERS:
            raise OptionError(f"format {format!r}: allowed are {', '.join(EXPORTERS)}")
        return EXPORTERS[format].text(self._state.export(self._answer.config))

    @property
    def _answer(self) -> Answer:
        if self._state.answer is None:
            raise ResumeError(f"{self.folder}: this run has no answer")
        return self._state.answer

    def _pooled(self, config: Config) -> pd.Series[float]:
        import pandas as pd

        point = pool(self._state.trials).get(config)
        if point is None:
            return pd.Series(dict(config), name=config.key)
        return store.pareto_table([point]).iloc[0]


class _Silent:
    """A listener for notebooks, where the verdict is what is looked at."""

    def note(self, text: str) -> None:
        """Keep quiet."""

    def begins(self, state: RunState) -> None:
        """Keep quiet."""

    def asks(self, ask: Ask, left_s: float) -> None:
        """Keep quiet."""

    def row(self, trial: Trial, run: RunState) -> None:
        """Keep quiet."""


def tune(model: str | Path, *overrides: str, **options: object) -> Run:
    """Tune a model file, as the command line does.

    Args:
        model: The model file, FILE or FILE:FACTORY. Probes import it in processes of their own.
        *overrides: Hydra overrides of the search space.
        **options: The command line's options: `space, budget, max_probes, global_batch,
            objectives, limits, min_gain, devices, sampler, output, keys, seed`.

    Raises:
        InputError: If the input is wrong; then nothing was created.
        NothingRanError: If no probe gave a number.
    """
    known = set(Options.__dataclass_fields__) - {"model", "overrides"}
    if unknown := sorted(set(options) - known):
        raise OptionError(f"unknown options {unknown}; known: {', '.join(sorted(known))}")
    given: dict[str, Any] = {name: _as_written(name, value) for name, value in options.items()}
    asked = Options(model=str(model), overrides=overrides, **given)
    return Run(driver.tune(new_run(asked), _Silent()))


def _as_written(name: str, value: object) -> object:
    """An option's value as the command line would have it: a notebook has numbers and lists."""
    if name == "no_reuse" or value is None:
        return value
    if name in ("max_probes", "devices", "seed"):
        if not isinstance(value, int):
            raise OptionError(f"{name}={value!r}: must be a whole number")
        return value
    words = [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    return tuple(words) if name == "limits" else ",".join(words)


def load_run(folder: str | Path) -> Run:
    """The run of a folder.

    Raises:
        ResumeError: If the folder holds no run.
    """
    return Run(load_state(Path(folder)))
