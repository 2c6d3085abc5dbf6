"""One trial of a hand-written tuner: trains for some steps and prints samples/s.

python one_trial.py MODEL CONFIG STEPS WARM_UP
"""

import json
import sys
import time
from itertools import chain, repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import ruler
import torch


def main() -> None:
    """Train, and print the rate."""
    model, words, steps, warm_up = sys.argv[1:]
    job = ruler.loaded(Path(model).resolve())
    config = {**job.CURRENT, **json.loads(words)}
    torch.set_num_threads(config["host.threads"])
    dataset = job.build_dataset()
    loader = torch.utils.data.DataLoader(dataset, **ruler.loader_arguments(job, dataset, config))
    train = ruler.trainer(job, config)
    batches = chain.from_iterable(repeat(loader))
    for _ in range(int(warm_up)):
        train(next(batches))
    started = time.perf_counter()
    for _ in range(int(steps)):
        train(next(batches))
    print(int(steps) * config["train.batch_size"] / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
