"""Scores of texts against references, kept with each prompt's record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.measuring.results import check_metrics, read_results
from eval.measuring.scores import PACKAGES, check_scores, text_score
from eval.reporting.report import render_page
from recipes.config import build
from recipes.run_eval import RECIPE
from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.forms import RawPrompt, RowReader
from tests.support.scores import evaluation_of


@pytest.mark.parametrize(
    ("name", "text", "reference", "score"),
    [
        ("rougeL", "the cat sat", "the cat sat on the mat", 2 / 3),
        ("rougeL", "a dog", "the cat", 0.0),
        ("bleu", "the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("exact_match", "So she has 18 eggs, 1,080.0 in all.", "2 * 540 = 1080\n#### 1,080", 1.0),
        ("exact_match", "#### 7 (not 8)\n#### 9", "#### 9", 1.0),
        ("exact_match", "#### 7 and 12", "#### 7", 0.0),
        ("exact_match", "no idea", "#### 7", 0.0),
        ("exact_match", " Paris", "Paris", 1.0),
    ],
)
def test_a_text_has_the_score_of_its_reference(
    name: str, text: str, reference: str, score: float
) -> None:
    assert text_score(name, text, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("wanted", "row", "reference"),
    [
        (PromptSet("gsm8k"), {"question": "1+1?", "answer": "1+1=2\n#### 2"}, "1+1=2\n#### 2"),
        (PromptSet("xsum"), {"document": "Long.", "summary": "Short."}, "Short."),
        (PromptSet("wmt-en-de"), {"translation": {"en": "Yes.", "de": "Ja."}}, "Ja."),
        (PromptSet("mine.jsonl"), {"prompt": "Yes?", "reference": "No."}, "No."),
        (PromptSet("mine.jsonl", reference="{gold}"), {"prompt": "Yes?", "gold": "No."}, "No."),
        (PromptSet("mine.jsonl"), {"prompt": "Yes?", "gold": "No."}, None),
        (PromptSet("mine.jsonl"), {"prompt": "2 + 2?", "reference": 4}, "4"),
    ],
)
def test_the_reference_of_a_row_is_catalogued_or_named(
    wanted: PromptSet, row: dict[str, Any], reference: str | None
) -> None:
    for chat in (False, True):
        (prompt,) = RowReader.of(replace(wanted, chat=chat), row, chat).prompts(1, row)
        assert isinstance(prompt, RawPrompt)
        assert prompt.reference == reference


@pytest.mark.parametrize(("reference", "read"), [(12, "12"), ("No.", "No."), (["No."], None)])
def test_the_reference_of_a_conversation_is_its_last_turns_or_is_unread(
    reference: Any, read: str | None
) -> None:
    talk = [{"role": role, "content": "Yes?"} for role in ("user", "assistant", "user")]
    row = {"messages": talk, "reference": reference}
    prompts = [*RowReader.of(PromptSet("mine.jsonl"), row, True).prompts(1, row)]
    assert all(isinstance(each, RawPrompt) for each in prompts)
    assert [(each.reference, each.row) for each in prompts] == [(None, 1), (read, 1)]
    assert [*prompts[0].unread] == (["`reference`"] if read is None else [])


def test_what_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scores(["rougeL", "bleu", "exact_match"])
    monkeypatch.setitem(PACKAGES, "bleu", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install '\.\[scores\]'"):
        check_scores(["bleu"])


@pytest.mark.slow
def test_an_evaluation_scores_what_has_a_reference_and_refuses_sets_without_one(
    trained_pair: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "Name a colour.", "reference": "red"},
        {"prompt": "Name a town.", "reference": "the town"},
        {"prompt": "Name a tree."},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = evaluation_of(
        trained_pair,
        tmp_path / "run",
        scores=["rougeL", "bleu", "exact_match"],
        sets=[{"name": str(tmp_path / "mine.jsonl"), "count": 3}],
        methods=[
            {"name": "plain", "decoder": "plain"},
            {"name": "uno", "verifier": "biased_uno", "verifier_args": {"epsilon": 0.5}},
        ],
    )
    RECIPE.main(build(asked))
    folder = tmp_path / "run" / "eval"
    results = read_results(folder / "results.json")
    check_metrics(results)
    plain, uno = results.runs
    names = {"rougeL", "bleu", "exact_match"}
    assert set(plain.scores) == set(uno.scores) == names
    assert [set(record.scores) for record in uno.generations] == [names, names, set()]
    page = render_page(results)
    assert "Scores of the texts" in page
    assert f"{uno.dataset}, uno<" in page
    assert f"{uno.scores['rougeL']:.3f}" in page

    asked["eval"]["sets"] = [{"name": "chat-letters", "count": 2}]
    asked["eval"]["folder"] = "eval-other"
    with pytest.raises(ConfigError, match="no prompt of chat-letters has one: give rows a column"):
        RECIPE.main(build(asked))
