"""Settings stored with an artefact: compared modulo defaults, refused with what differs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel, Field, model_serializer
from pydantic_core import to_jsonable_python

from recipes.config import PipelineConfig, parse
from recipes.layout import labels_stage, rollouts_stage
from specdata.errors import ConfigError, ManifestError, OtherSettingsError
from specdata.storage.dataset import fill_dataset
from specdata.storage.files import write_json
from specdata.storage.manifest import describe_shard
from specdata.storage.resume import (
    Settings,
    defaults_of,
    differences,
    read_record,
)
from specdata.storage.schema import ROLLOUTS, Rollout


@dataclasses.dataclass(frozen=True)
class Method:
    name: str
    length: int = 4
    widths: tuple[int, ...] = ()


class Server(BaseModel):
    url: str = "here"
    tries: Annotated[int, Field(ge=1)] = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    methods: list[Method]
    server: Server = dataclasses.field(default_factory=lambda: Server(tries=2))
    other: Server | None = None
    batch: int = 1


DEFAULTS = defaults_of(Plan, "plan")
STORED: dict[str, Any] = {
    "plan": {
        "methods": {
            "plain": {"name": "plain", "length": 4, "widths": []},
            "K=.5": {"name": "K=.5"},
        },
        "server": {"url": "here", "tries": 2},
        "batch": 1,
    },
    "seed": 0,
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(STORED))
    change(settings["plan"])
    return settings


def test_defaults_are_read_from_dataclasses_and_pydantic_models_and_what_is_in_them() -> None:
    assert defaults_of(Plan) == {
        "methods.*.length": 4,
        "methods.*.widths": [],
        "server": {"url": "here", "tries": 2},
        "server.url": "here",
        "server.tries": 6,
        "other": None,
        "other.url": "here",
        "other.tries": 6,
        "batch": 1,
    }


def test_a_configuration_becomes_json_and_differs_from_itself_in_nothing() -> None:
    plan = Plan([Method("a", widths=(2, 1))])
    values = to_jsonable_python(plan)
    assert values["methods"] == [{"name": "a", "length": 4, "widths": [2, 1]}]
    assert differences(json.loads(json.dumps(values)), values, defaults_of(Plan)) == []
    assert Settings({"widths": (1, 2)}).values == {"widths": [1, 2]}


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.pop("batch"),
        lambda plan: plan.update(other=None),
        lambda plan: plan.pop("server"),
        lambda plan: plan["methods"]["plain"].pop("widths"),
        lambda plan: plan["methods"]["K=.5"].update(length=4),
    ],
    ids=["option", "section", "section with its own default", "nested", "by name"],
)
def test_an_option_that_is_absent_counts_as_its_default_on_either_side(
    change: Callable[[dict[str, Any]], object],
) -> None:
    assert differences(STORED, changed(change), DEFAULTS) == []
    assert differences(changed(change), STORED, DEFAULTS) == []
    assert differences(STORED, changed(change)), "without defaults it differs"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda plan: plan.update(batch=3), "plan.batch: 1 -> 3"),
        (lambda plan: plan["server"].update(tries=6), "plan.server.tries: 2 -> 6"),
        (lambda plan: plan["server"].pop("tries"), "plan.server.tries: 2 -> 6"),
        (
            lambda plan: plan.update(other={"url": "there", "tries": 6}),
            "plan.other: None -> {'url': 'there'}",
        ),
        (
            lambda plan: plan["methods"]["K=.5"].update(length=8),
            "plan.methods.K=.5.length: 4 -> 8",
        ),
        (
            lambda plan: plan["methods"].update(new={"name": "new", "length": 2, "widths": []}),
            "plan.methods.new: absent -> {'name': 'new', 'length': 2}",
        ),
        (
            lambda plan: plan["methods"].pop("plain"),
            "plan.methods.plain: {'name': 'plain'} -> absent",
        ),
        (lambda plan: plan.update(unknown=None), "plan.unknown: absent -> None"),
    ],
)
def test_only_what_differs_is_shown(change: Callable[[dict[str, Any]], object], line: str) -> None:
    assert differences(STORED, changed(change), DEFAULTS) == [line]


def test_items_of_lists_are_compared_one_by_one() -> None:
    defaults = {"sets.*.count": 100}
    stored = {"sets": [{"name": "a"}, {"name": "b", "count": 5}]}
    assert (
        differences(stored, {"sets": [{"name": "a", "count": 100}, stored["sets"][1]]}, defaults)
        == []
    )
    asked = {"sets": [{"name": "a"}, {"name": "b"}, {"name": "c", "count": 100}]}
    assert differences(stored, asked, defaults) == [
        "sets.1.count: 5 -> 100",
        "sets.2: absent -> {'name': 'c'}",
    ]


def test_a_removed_option_is_tolerated_if_its_former_default_is_given() -> None:
    stored = changed(lambda plan: plan["methods"]["plain"].update(old=3))
    assert differences(stored, STORED, DEFAULTS) == ["plan.methods.plain.old: 3 -> absent"]
    assert differences(stored, STORED, DEFAULTS | {"plan.methods.*.old": 3}) == []
    assert differences(stored, STORED, DEFAULTS | {"plan.methods.*.old": 4}) == [
        "plan.methods.plain.old: 3 -> 4"
    ]


def test_defaults_are_keyed_as_a_class_stores_itself() -> None:
    class Rule(BaseModel):
        name: str = "fixed"
        length: int = 4

    class Flat(BaseModel):
        label: str
        rule: Rule = Rule()

        @model_serializer
        def _flat(self) -> dict[str, Any]:
            return {"rule": self.rule.name, "length": self.rule.length}

    defaults = defaults_of(Flat, "rules.*")
    assert (defaults["rules.*.rule"], defaults["rules.*.length"]) == ("fixed", 4)
    assert differences({"rules": {"a.b": {}}}, {"rules": {"a.b": {"length": 4}}}, defaults) == []


def test_the_default_of_one_item_is_preferred_to_that_of_any() -> None:
    defaults = {"methods.*.length": 4, "methods.K=.5.length": 8}
    stored = {"methods": {"K=.5": {}, "K": {}}}
    asked = {"methods": {"K=.5": {"length": 8}, "K": {"length": 8}}}
    assert differences(stored, asked, defaults) == ["methods.K.length: 4 -> 8"]


def test_a_refusal_names_the_artefact_the_differences_and_the_remedy() -> None:
    asked = Settings(changed(lambda plan: plan.update(batch=3)), DEFAULTS, "use another --folder")
    with pytest.raises(OtherSettingsError) as error:
        asked.check(STORED, "runs/toy/eval")
    assert str(error.value) == (
        "runs/toy/eval was made with other settings: use another --folder. Stored -> asked:\n"
        "  plan.batch: 1 -> 3"
    )
    assert isinstance(error.value, ConfigError)
    assert isinstance(error.value, ManifestError)
    asked.check(asked.values, "runs/toy/eval")
    with pytest.raises(ManifestError, match=r"eval was not written .*use another --folder"):
        asked.check([], "runs/toy/eval")  # type: ignore[arg-type]


def test_settings_are_stored_in_a_file_and_checked_against_it(tmp_path: Path) -> None:
    path = tmp_path / "work" / "settings.json"
    settings = Settings(STORED, DEFAULTS)
    assert not settings.check_file(path)
    settings.write(path)
    assert settings.check_file(path)
    assert Settings(changed(lambda plan: plan.pop("batch")), DEFAULTS).check_file(path)
    with pytest.raises(OtherSettingsError, match=r"work was made with .* another output folder"):
        settings.extended({"seed": 1}).check_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("\udce4", "is damaged"),
        ("[1]", "was not written by this program"),
        ('{"a": 1}', "it has no 'b'"),
    ],
)
def test_a_damaged_record_is_refused_with_its_name_and_the_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ManifestError, match=f"run.json .*{message}.*: remove FOLDER$"):
        read_record(path, ("a", "b"), "remove FOLDER")
    path.write_text('{"a": 1, "b": 2, "c": 3}')
    assert read_record(path, ("a", "b"), "remove FOLDER") == {"a": 1, "b": 2, "c": 3}


# What the first release stored for the demo, as it is in the files of that time.
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def prompt_set(name: str, split: str, count: int) -> dict[str, Any]:
    absent = dict.fromkeys(("source", "subset", "source_split", "template", "chat"))
    return {"name": name, "split": split, "count": count, **absent, "turns": "all"}


FIRST_ROLLOUTS: dict[str, Any] = {
    "rollouts": {
        "sets": [
            prompt_set("instruct", "train", 512),
            prompt_set("instruct", "dev", 48),
            prompt_set("instruct", "test", 16),
            prompt_set("maths", "test", 16),
            prompt_set("code", "test", 16),
        ],
        "max_new_tokens": 96,
        "samples": 1,
        "shard_size": 64,
        "batch_size": 64,
        "backend": "transformers",
    },
    "sampling": SAMPLING,
    "seed": 0,
    "dtype": "float32",
}
FIRST_LABELS = {
    "labels": {"shard_size": 64, "top_logits": 0, "cache": None, "bound": False},
    "sampling": SAMPLING,
    "seed": 0,
    "dtype": "float32",
}


def first_demo() -> PipelineConfig:
    """Today's demo with the data of the first release's."""
    first = FIRST_ROLLOUTS["rollouts"]
    sets = [{name: each[name] for name in ("name", "split", "count")} for each in first["sets"]]
    sizes = ["--rollouts.batch_size=64", "--rollouts.shard_size=64", "--labels.draws=1"]
    return parse([f"--rollouts.sets={json.dumps(sets)}", *sizes], "").config


def test_stages_of_the_demo_that_the_first_release_stored_are_the_same_now() -> None:
    config, defaults = first_demo(), defaults_of(PipelineConfig)
    assert differences(FIRST_ROLLOUTS, rollouts_stage(config).settings.values, defaults) == []
    assert differences(FIRST_LABELS, labels_stage(config).settings.values, defaults) == []


def test_a_dataset_that_the_first_release_stored_is_finished_and_one_it_began_goes_on(
    tmp_path: Path,
) -> None:
    rows = [
        Rollout(
            example_id="a",
            dataset="instruct",
            split="train",
            sample=0,
            turn=0,
            prompt_ids=[1],
            completion_ids=[2, 3],
            finish="length",
        )
    ]
    shard = tmp_path / "shard-00000.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=ROLLOUTS), shard)
    entry = describe_shard(shard, shard.name, rows)
    made_of = {"target": {"name": "pair"}, "tokenizer": "0123", "prompts": []}
    manifest = {
        "schema_version": 2,
        "settings": {**FIRST_ROLLOUTS, **made_of},
        "counts": {"rows": 1, "tokens": 2, "finish": {"length": 1}},
        "shards": [entry],
        "finished": True,
    }
    write_json(tmp_path / "manifest.json", manifest)
    stage = rollouts_stage(first_demo())
    settings = Settings({**stage.settings.values, **made_of}, defaults_of(PipelineConfig))

    def never() -> list[Rollout]:
        raise AssertionError("it is there already")

    assert fill_dataset(tmp_path, ROLLOUTS, settings, [never], lambda rows: None) == 1
    write_json(tmp_path / "manifest.json", {**manifest, "shards": [], "finished": False})
    write_json(tmp_path / ".progress" / f"{shard.name}.json", entry)
    made = fill_dataset(tmp_path, ROLLOUTS, settings, [never, lambda: rows], lambda rows: None)
    assert made == 2
