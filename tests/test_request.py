"""What may be asked of the search space, and how a wrong wish is answered."""

import subprocess
import sys

import pytest

from autotune import request
from autotune.errors import SpaceError
from autotune.knobs import AUTO, KNOBS
from autotune.request import Choice, Request, read_request, space_names


def sample(knob):
    """Some values that the knob can have."""
    least = knob.domain.least
    return knob.domain.words if least is None else (least, least + 1, least + 4)


def hydra(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


KNOB_VALUES = [(knob, value) for knob in KNOBS.values() for value in sample(knob)]
NAMES = [f"{knob.name}={hydra(value)}" for knob, value in KNOB_VALUES]


@pytest.fixture
def space(tmp_path):
    """A function that writes a space file and gives its path."""

    def write(text="{}", name="space.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def nested(name, text):
    group, _, leaf = name.rpartition(".")
    return f"{group}:\n  {leaf}: {text}\n"


def refusal(asked, overrides=()):
    with pytest.raises(SpaceError) as caught:
        read_request(asked, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(("knob", "value"), KNOB_VALUES, ids=NAMES)
def test_every_value_can_be_pinned_by_an_override(space, knob, value, prefix):
    asked = read_request(space(), [f"{prefix}{knob.name}={hydra(value)}"])
    assert asked == Request({knob.name: Choice((value,))})
    assert type(asked.choices[knob.name].values[0]) is type(value)


@pytest.mark.parametrize(("knob", "value"), KNOB_VALUES, ids=NAMES)
def test_every_value_can_be_pinned_by_a_space_file(space, knob, value):
    asked = read_request(space(nested(knob.name, hydra(value))), ())
    assert asked == Request({knob.name: Choice((value,))})


@pytest.mark.parametrize("knob", KNOBS.values(), ids=list(KNOBS))
@pytest.mark.parametrize("form", ["{}", "[{}]", "choice({})"])
def test_every_knob_takes_lists(space, knob, form):
    values = tuple(sample(knob))
    text = form.format(",".join(map(hydra, values)))
    expected = Request({knob.name: Choice(values)})
    assert read_request(space(), [f"{knob.name}={text}"]) == expected
    if form != "{}":
        assert read_request(space(nested(knob.name, text)), ()) == expected


@pytest.mark.parametrize("knob", KNOBS.values(), ids=list(KNOBS))
def test_every_knob_can_be_left_to_the_machine_and_to_the_baseline(space, knob):
    path = space(nested(knob.name, AUTO))
    assert read_request(path, ()) == Request({knob.name: Choice(None)})
    assert read_request(space(), [f"{knob.name}=auto"]) == Request({knob.name: Choice(None)})
    assert read_request(path, [f"~{knob.name}"]) == Request({})
    assert read_request(space(), [f"~{knob.name}"]) == Request({})


@pytest.mark.parametrize("knob", KNOBS.values(), ids=list(KNOBS))
@pytest.mark.parametrize("text", ["nonsense", "-1", "1.5", "1e3", "12E4", "null", "{a: 1}", "''"])
def test_every_knob_refuses_what_it_cannot_have(space, knob, text):
    path = space(nested(knob.name, text))
    assert knob.name in refusal(path)
    assert "allowed: " in refusal(path)
    assert path in refusal(path)
    word = f"{knob.name}={text.replace(' ', '')}"
    assert f"override {word}" in refusal(space(), [word])


@pytest.mark.parametrize("name", space_names())
def test_every_ready_made_space_can_be_read(name):
    assert read_request(name, ()).choices


def test_the_default_space_is_there():
    assert "default" in space_names()


def test_choices_come_in_the_tables_order(space):
    backwards = [f"{name}=auto" for name in reversed(KNOBS)]
    assert list(read_request(space(), backwards).choices) == list(KNOBS)


def test_overrides_win_over_the_file_and_the_last_one_wins(space):
    path = space("loader: {num_workers: auto, prefetch_factor: [2, 4]}")
    words = ["loader.num_workers=2", "loader.num_workers=0,4,4,8"]
    assert read_request(path, words).choices == {
        "loader.num_workers": Choice((0, 4, 8)),
        "loader.prefetch_factor": Choice((2, 4)),
    }


@pytest.mark.parametrize("text", ["range(1,5)", "range(1, 5)", "range(start=1,stop=5)"])
def test_ranges_are_listed(space, text):
    expected = Request({"loader.num_workers": Choice((1, 2, 3, 4))})
    assert read_request(space(nested("loader.num_workers", text)), ()) == expected
    assert read_request(space(), [f"loader.num_workers={text}"]) == expected


def test_quoted_words_are_plain_text(space):
    assert read_request(space(), ["train.precision='bf16',\"fp16\""]).choices == {
        "train.precision": Choice(("bf16", "fp16"))
    }


def test_yaml_words_for_bools(space):
    asked = read_request(space("loader: {pin_memory: [yes, off], persistent_workers: on}"), ())
    assert asked.choices == {
        "loader.pin_memory": Choice((True, False)),
        "loader.persistent_workers": Choice((True,)),
    }


def test_dotted_names_empty_groups_and_comments_are_fine(space):
    asked = read_request(space("\ufeffloader.num_workers: 2\ntrain:\n  # precision: auto\n"), ())
    assert asked == Request({"loader.num_workers": Choice((2,))})


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("loader.num_worker=2", "did you mean loader.num_workers?"),
        ("loader/num_workers=2", "did you mean loader.num_workers?"),
        ("~loader.num_worker", "did you mean loader.num_workers?"),
        ("~loader.num_workers=2", "write ~loader.num_workers"),
        ("loader.num_workers@train=2", "@package"),
        ("loader.num_workers", "write knob=value"),
        ("loader.num_workers=[", "write knob=value"),
        ("loader.num_workers = 2", "write knob=value"),
        ("loader.num_workers=[]", "lists no value"),
        ("loader.num_workers=choice()", "write knob=value"),
        ("loader.num_workers=range(5,1)", "lists no value"),
        ("loader.num_workers=range(1,5,0)", "write knob=value"),
        ("loader.num_workers=range(1.0,5.0,0.0)", "write knob=value"),
        ("loader.num_workers=range(1.5,4)", "allowed: a whole number"),
        ("loader.num_workers=range(0,1000000000)", "more than"),
        ("loader.num_workers=interval(1,5)", "interval(...) does not list values"),
        ("loader.num_workers=1,interval(1,5)", "interval(...) does not list values"),
        ("loader.num_workers=1,choice(1,5)", "allowed: a whole number"),
        ("loader.num_workers=glob(*)", "glob(...) does not list values"),
        ("loader.num_workers=tag(a,choice(1,2))", "tag(...) does not list values"),
        ("loader.num_workers=sort(2,1)", "sort(...) does not list values"),
        ("loader.num_workers=shuffle([1,2])", "shuffle(...) does not list values"),
        ("loader.num_workers=int(2)", "int(...) does not list values"),
        ("loader.num_workers=nonsense(2)", "write knob=value"),
        ("loader.num_workers=${x}", "allowed: a whole number"),
        ("loader.num_workers=auto,2", "allowed: a whole number"),
        ("loader.num_workers='2'", "allowed: a whole number"),
        ("loader={num_workers:2}", "unknown knob loader"),
        ("loader.pin_memory=1", "allowed: true, false"),
    ],
)
def test_wrong_overrides(space, word, says):
    text = refusal(space(), [word])
    assert f"override {word}" in text
    assert says in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "an empty file"),
        ("# only a comment\n", "an empty file"),
        ("[1, 2]", "a list"),
        ("auto", "a str"),
        ("loader: 3", "loader is a group of knobs, to be named below it: num_workers"),
        ("loader: [num_workers]", "loader is a group of knobs"),
        ("loader: {num_worker: 3}", "did you mean loader.num_workers?"),
        ("loder: {num_workers: 3}", "did you mean loader.num_workers?"),
        ("loader: {loader: {num_workers: 3}}", "unknown knob loader.loader.num_workers"),
        ("loader: &a {loader: *a}", "unknown knob loader.loader.loader"),
        ("1: 2", "unknown knob 1"),
        ("loader: {}\nloader: {}", ":2: not valid YAML: loader is named twice"),
        ("loader:\n  pin_memory: on\n  pin_memory: off", ":3: not valid YAML: pin_memory is named"),
        ("loader.pin_memory: on\nloader: {pin_memory: on}", "loader.pin_memory is named twice"),
        ("loader: {num_workers: []}", "lists no value"),
        ("loader: {num_workers: [[1, 2]]}", "allowed: a whole number"),
        ("loader: {num_workers: [1, auto]}", "allowed: a whole number"),
        ("loader: {num_workers: 'interval(1,5)'}", "interval(...) does not list values"),
        ("loader: {num_workers: 'choice(1,'}", "Hydra cannot read it"),
        ("loader: {num_workers: 2024-13-45}", "not valid YAML"),
        ("loader:\n\tnum_workers: 2", ":2: not valid YAML"),
        ("loader:\n\tnum_workers: 2", "indent with blanks, not tabs"),
        ("loader: {", "not valid YAML"),
        ("loader: {? [a] : 1}", "not valid YAML"),
        ("a: 1\n---\nb: 1", "not valid YAML"),
        ("loader: \x07", "not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
        (b"\xff\xfe\xfa", "cannot be read"),
    ],
)
def test_wrong_files(space, content, says):
    path = space(content)
    text = refusal(path)
    assert path in text
    assert says in text


def test_missing_and_unreadable_files(tmp_path):
    assert "No such file" in refusal(str(tmp_path / "none.yaml"))
    assert "No such file" in refusal("none.yml")
    assert "Is a directory" in refusal(str(tmp_path))
    assert "cannot be read" in refusal("a\0b.yaml")


@pytest.mark.parametrize("name", ["", "..", "defualt", "no such space"])
def test_unknown_names_list_the_known_ones(name):
    text = refusal(name)
    assert repr(name) in text
    assert all(known in text for known in space_names())


def test_a_near_name_is_suggested():
    assert "did you mean default?" in refusal("defualt")


def test_a_json_file_is_a_mapping_too(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text('{\n\t"a": {"b": 1e5, "c": true}\n}')
    assert request.read_mapping(path) == {"a": {"b": 1e5, "c": True}}
    for wrong, says in {"{": "not valid JSON", '{"a": 1, "a": 2}': "a is named twice"}.items():
        path.write_text(wrong)
        with pytest.raises(SpaceError, match=says):
            request.read_mapping(path)


def test_hydra_is_imported_only_when_it_is_needed(space):
    path = space("loader: {num_workers: [1, 2]}")
    code = (
        "import sys; from autotune.request import read_request; import autotune.exporters; "
        f"read_request({path!r}, []); heavy = 'hydra', 'omegaconf', 'torch', 'pandas', 'optuna'; "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
