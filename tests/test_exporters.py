"""Every format, for every knob and value, read back by what will read it."""

import json
import shlex
import subprocess
import sys
import textwrap

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from autotune import exporters
from autotune.errors import SpaceError
from autotune.exporters import EXPORTERS, Export, check_keys, read_keys
from autotune.knobs import KNOBS
from autotune.precision import PRECISIONS
from autotune.types import ModelRef

MODEL = ModelRef(path="mymodel.py")
OWN = [
    *("bf16-mixed", "32-true", "16", "1e5", "1E234", "12E4", "1_000", "007", "-5", ".5", "inf"),
    *("nan", "null", "Null", "true", "FALSE", "on", "yes", "~", "None", "", "a,b", "a=b", "{a:1}"),
    *(
        "[1]",
        "x#y",
        "with'quote",
        'with"quote',
        "back\\slash",
        "end\\",
        "\\'",
        "\\\\'x'\\",
        "10:30",
    ),
    *("2024-01-01", "torch.bfloat16", "a/b", "f(x)", "choice(1,2)", "*", "größe", "$x", "%", "@"),
    *(16, -1, 0.5, 1e-5, 1e20, True, False, None),
]


def sample(knob):
    """Some values that the knob can have."""
    least = knob.domain.least
    return knob.domain.words if least is None else (least, least + 1, least + 4)


KNOB_VALUES = [(knob, value) for knob in KNOBS.values() for value in sample(knob)]
OVERRIDABLE = {name: knob for name, knob in KNOBS.items() if not knob.environment}
VARIABLES = {name: knob for name, knob in KNOBS.items() if knob.environment}
FULL = {name: sample(knob)[-1] for name, knob in KNOBS.items()}


def export_of(values, keys=None, device="cpu"):
    return Export(values=values, model=MODEL, keys=keys or {}, device=device)


def read_back(word):
    """The key and value that Hydra reads in one override."""
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override()
    return override.get_key_element(), override.value()


def same(read, written):
    return read == written and type(read) is type(written)


@pytest.mark.parametrize(("knob", "value"), KNOB_VALUES, ids=lambda part: str(part)[:24])
def test_every_value_reads_back(knob, value):
    export = export_of({knob.name: value})
    words = exporters.overrides(export)
    if knob.environment:
        assert words == ()
        return
    assert words == (f"{knob.name}={str(value).lower()}",)
    key, read = read_back(words[0])
    assert key == knob.name
    assert same(read, value)
    group, leaf = knob.name.split(".")
    assert same(yaml.safe_load(exporters.best_yaml(export))[group][leaf], value)


def test_the_line_has_the_tables_order_and_no_variables():
    backwards = dict(reversed(FULL.items()))
    words = exporters.overrides(export_of(backwards))
    assert [word.partition("=")[0] for word in words] == list(OVERRIDABLE)


@pytest.mark.parametrize("own", OWN, ids=repr)
def test_own_values_read_back_everywhere(own, tmp_path):
    keys = {"train.precision": {"key": "trainer.precision", "values": {"bf16": own}}}
    export = export_of({"train.precision": "bf16"}, check_keys(keys, "KEYS"))
    (word,) = exporters.overrides(export)
    assert word.split() == [word]
    key, read = read_back(word)
    assert key == "trainer.precision"
    assert same(read, own)
    assert shlex.split(exporters.command(export)) == ["python", "train.py", word]
    text = exporters.best_yaml(export)
    assert same(yaml.safe_load(text)["trainer"]["precision"], own)
    assert same(OmegaConf.create(text).trainer.precision, own)


@pytest.mark.parametrize("plain", ["bf16-mixed", "32-true", "torch.bfloat16", "a/b", "007x"])
def test_plain_text_stays_without_quotes(plain):
    keys = {"train.precision": {"key": "p", "values": {"bf16": plain}}}
    assert exporters.overrides(export_of({"train.precision": "bf16"}, keys)) == (f"p={plain}",)


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_every_knob_can_have_an_own_key_and_own_values(name):
    values = sample(KNOBS[name])
    translation = {value: f"own-{value}" for value in values}
    keys = {name: {"key": "+my.own_key", "values": translation}}
    # A model file gives Python's values, its JSON or a keys file may give texts.
    for given in (keys, json.loads(json.dumps(keys))):
        checked = check_keys(given, "KEYS")
        assert check_keys(checked, "KEYS") == checked
        for value in values:
            export = export_of({name: value}, checked)
            assert exporters.overrides(export) == (f"+my.own_key=own-{value}",)
            assert yaml.safe_load(exporters.best_yaml(export)) == {
                "my": {"own_key": f"own-{value}"}
            }
            assert exporters.unmapped(export) == ()


def test_what_the_keys_do_not_say_is_left_out_and_named():
    keys = {
        "train.batch_size": "data.batch_size",
        "train.precision": {"key": "trainer.precision", "values": {"fp32": "32-true"}},
        "loader.num_workers": "data.workers",
        "host.threads": "never.written",
    }
    values = {**FULL, "loader.num_workers": 8, "train.batch_size": 64, "train.precision": "default"}
    export = export_of(values, check_keys(keys, "KEYS"))
    assert exporters.overrides(export) == ("data.workers=8", "data.batch_size=64")
    named = {"loader.num_workers", "train.batch_size"}
    assert exporters.unmapped(export) == tuple(name for name in OVERRIDABLE if name not in named)
    assert exporters.unmapped(export_of(values)) == ()


def test_the_environment_goes_in_front():
    export = export_of(
        {"host.threads": 2, "host.omp_wait_policy": "passive", "train.batch_size": 8}
    )
    assert exporters.environment(export) == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    prefix = "OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive "
    assert exporters.environment_prefix(export) == prefix
    assert exporters.command(export) == f"{prefix}python train.py train.batch_size=8"


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_is_in_the_command(name):
    value = sample(KNOBS[name])[-1]
    line = exporters.command(export_of({name: value}))
    assert line == f"{KNOBS[name].environment}={value} python train.py"
    assert exporters.environment_prefix(export_of({name: KNOBS[name].default})) == ""


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "train.precision": {
                "key": "trainer.precision",
                "values": {FULL["train.precision"]: "1e5"},
            }
        },
    ],
    ids=["our keys", "own keys"],
)
def test_best_yaml_composes_with_hydra(tmp_path, keys):
    (tmp_path / "autotune").mkdir()
    (tmp_path / "config.yaml").write_text(
        "trainer: {precision: 32, seed: 1}\nloader: {shuffle: on}\n"
    )
    text = exporters.best_yaml(export_of(FULL, keys))
    assert text.startswith("# @package _global_\n")
    (tmp_path / "autotune" / "best.yaml").write_text(text)
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("config", ["+autotune=best"])
    assert config.trainer.seed == 1
    assert config.loader.shuffle is True
    if keys:
        assert config.trainer.precision == "1e5"
    else:
        assert all(same(OmegaConf.select(config, name), FULL[name]) for name in OVERRIDABLE)


def test_best_yaml_of_nothing_composes(tmp_path):
    (tmp_path / "autotune").mkdir()
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "autotune" / "best.yaml").write_text(exporters.best_yaml(export_of({})))
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        assert hydra.compose("config", ["+autotune=best"]) == {"a": 1}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["train.batch_size"], "must map knobs"),
        ({"train.batchsize": "a"}, "did you mean train.batch_size?"),
        ({3: "a"}, "unknown knob 3"),
        ({"train.batch_size": 3}, "must be your own key"),
        ({"train.batch_size": None}, "must be your own key"),
        ({"train.batch_size": {}}, "must be your own key"),
        ({"train.batch_size": {"key": "a", "value": {}}}, "must be your own key"),
        ({"train.batch_size": {"key": 3}}, "no dotted Hydra key"),
        ({"train.batch_size": ""}, "no dotted Hydra key"),
        ({"train.batch_size": "a b"}, "no dotted Hydra key"),
        ({"train.batch_size": "a=b"}, "no dotted Hydra key"),
        ({"train.batch_size": "a/b"}, "no dotted Hydra key"),
        ({"train.batch_size": "a..b"}, "no dotted Hydra key"),
        ({"train.batch_size": "~a"}, "no dotted Hydra key"),
        ({"train.batch_size": "a\n"}, "no dotted Hydra key"),
        ({"train.batch_size": {"key": "a", "values": [1]}}, "values must be a mapping"),
        ({"train.batch_size": {"key": "a", "values": {"x": 1}}}, "allowed: a whole number"),
        ({"train.precision": {"key": "a", "values": {"bf17": 1}}}, "train.precision='bf17'"),
        (
            {"train.precision": {"key": "a", "values": {"bf16": [1]}}},
            "a text, number, bool or null",
        ),
        ({"train.precision": {"key": "a", "values": {"bf16": "x y"}}}, "holds a blank"),
        ({"train.precision": {"key": "a", "values": {"bf16": "x\ty"}}}, "holds a blank"),
        ({"train.precision": {"key": "a", "values": {"bf16": float("nan")}}}, "not finite"),
        ({"train.precision": "a", "train.batch_size": "a"}, "one cannot be set beside the other"),
        ({"train.precision": "a", "train.batch_size": "+a.b"}, "one cannot be set beside"),
    ],
)
def test_wrong_keys(keys, says):
    with pytest.raises(SpaceError) as caught:
        check_keys(keys, "KEYS in mymodel.py")
    assert str(caught.value).startswith("KEYS in mymodel.py: ")
    assert says in str(caught.value)


def test_keys_from_a_file(tmp_path):
    keys = {"train.batch_size": "data.batch_size", "loader.pin_memory": {"key": "pin"}}
    for name, text in {"k.yaml": yaml.safe_dump(keys), "k.json": json.dumps(keys)}.items():
        (tmp_path / name).write_text(text)
        read = read_keys(tmp_path / name)
        assert read == keys
        assert list(read) == ["loader.pin_memory", "train.batch_size"]
    (tmp_path / "wrong.yaml").write_text("train.batch_size: [1]")
    with pytest.raises(SpaceError, match=r"wrong\.yaml: train\.batch_size must be your own key"):
        read_keys(tmp_path / "wrong.yaml")


@pytest.mark.parametrize("name", EXPORTERS)
def test_every_exporter_names_every_value(name):
    export = export_of(FULL, device="cuda:0")
    text = EXPORTERS[name].text(export)
    assert EXPORTERS[name].about
    assert text == text.rstrip()
    for knob in OVERRIDABLE.values():
        if FULL[knob.name] != knob.default and knob.name != "train.precision":
            assert str(FULL[knob.name]).lower() in text.lower(), knob.name


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
@pytest.mark.parametrize(("knob", "value"), KNOB_VALUES, ids=lambda part: str(part)[:24])
def test_the_torch_text_is_python(knob, value, device):
    text = EXPORTERS["torch"].text(export_of({**FULL, knob.name: value}, device=device))
    compile(text, "torch.py", "exec")
    assert ("prefetch_factor" in text) == (knob.name != "loader.num_workers" or value != 0)


def test_the_torch_text_tells_what_it_does_not_show(monkeypatch):
    monkeypatch.setattr(exporters, "_SPELT_OUT", ())
    text = EXPORTERS["torch"].text(export_of({"train.batch_size": 8}))
    assert "# Not shown here: train.batch_size=8" in text


JOB = textwrap.dedent("""
    import json, sys, warnings
    import torch

    warnings.simplefilter("error")
    done = {}
    for name, text in json.load(sys.stdin).items():
        torch.manual_seed(0)
        dataset = torch.utils.data.TensorDataset(torch.randn(9, 3), torch.randn(9, 1))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        dtypes = set()

        def compute_loss(model, batch):
            out = model(batch[0])
            dtypes.add(str(out.dtype))
            # Small, so that fp16's first loss scale does not overflow and skip a step.
            return torch.nn.functional.mse_loss(out.float(), batch[1]) / 1000

        before = model.weight.detach().clone()
        exec(compile(text, name, "exec"), dict(globals()))
        moved = not torch.equal(before, model.weight)
        done[name] = [len(steps), sorted(dtypes), moved, torch.get_num_threads()]
    json.dump(done, sys.stdout)
""")
RAN = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def test_the_torch_text_trains_in_every_precision():
    texts, expected = {}, {}
    for precision in PRECISIONS:
        for accumulation in (1, 2):
            values = {
                "loader.num_workers": 0,
                "train.batch_size": 2,
                "train.accumulation_steps": accumulation,
                "train.precision": precision,
                "host.threads": accumulation,
            }
            name = f"{precision} x {accumulation}"
            texts[name] = EXPORTERS["torch"].text(export_of(values))
            dtype = RAN.get(precision, "torch.float32")
            expected[name] = [4 // accumulation, [dtype], True, accumulation]
    done = subprocess.run(
        [sys.executable, "-c", JOB], input=json.dumps(texts), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
