"""How people write it: Optuna's TPE, and a Python started for every trial.

    python plain_tpe.py MODEL SECONDS

Searches loader, precision and threads at the user's batch until the time is over, and prints the
best config as JSON. Every trial trains for 60 steps after 5, in an interpreter of its own.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import optuna

STEPS, WARM_UP = 60, 5
TRIAL = Path(__file__).with_name("one_trial.py")


def main() -> None:
    """Search, and print the best."""
    model, seconds = sys.argv[1], float(sys.argv[2])
    end_s = time.monotonic() + seconds
    cpus = len(os.sched_getaffinity(0))
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        workers = trial.suggest_int("loader.num_workers", 0, 2 * cpus)
        config = {
            "loader.num_workers": workers,
            "host.threads": trial.suggest_int("host.threads", 1, cpus),
            "train.precision": trial.suggest_categorical("train.precision", ["default", "bf16"]),
        }
        if workers:
            config["loader.prefetch_factor"] = trial.suggest_categorical("prefetch", [2, 4, 8])
            config["loader.persistent_workers"] = trial.suggest_categorical("keep", [False, True])
        trial.set_user_attr("config", config)
        left_s = end_s - time.monotonic()
        command = [sys.executable, str(TRIAL), model, json.dumps(config), str(STEPS), str(WARM_UP)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=left_s, check=True)
        except (subprocess.SubprocessError, ValueError):
            raise optuna.TrialPruned from None
        return float(done.stdout.split()[-1])

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, timeout=seconds)
    done = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    print(json.dumps(study.best_trial.user_attrs["config"] if done else {}))


if __name__ == "__main__":
    main()
