"""The prompt sets of the papers: where each comes from, its licence, template and splits.

Licences are what the data set's own page states; "unknown" is what the page says. Where a paper
does not say how it cut a set or worded a prompt, a comment says that the choice is ours.

A split is either one of the source's own, or a part of it that is cut by content: prompts are
ranked by the sha256 of their columns, and a split is a range of ranks. So it depends on no seed and
no row order, and equal rows are never in two splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdata.prompts.natural import LONG, NATURAL
from specdata.toy.corpus import FAMILIES

EMBEDDED = (*FAMILIES, *NATURAL, LONG)
# The Hub's own conversion, for repositories that hold a script, and how it names its files.
PARQUET_EXPORT = "refs/convert/parquet"
_EXPORTED = {name: f"*/{name}/*.parquet" for name in ("train", "validation", "test")}


@dataclass(frozen=True, slots=True)
class Part:
    """A split of the source, or a part of it: the prompts between two ranks, as shares of 1."""

    of: str
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True, slots=True)
class Form:
    """The way from a row to prompts.

    Args:
        ask: the user's message where the target has a chat template: the first of these texts
            whose columns are all filled.
        plain: the text for a target without one, chosen alike.
        questions: column with the user's turns, whose later ones depend on the model's answers.
        messages: column with a recorded conversation.
        roles: what the recorded roles are called here.
        keys: names of a message's role and of its content.
        keep: share of the words that is the prompt; the rest is what a model would write.
        reference: the text that an answer is scored against, if rows have one.
    """

    ask: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    questions: str | None = None
    messages: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, str] = ("role", "content")
    keep: float = 1.0
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedSet:
    """One catalogued set.

    Args:
        hub: id on the Hub, or the URL of a file to download where the set is not there.
        licence: as its page states it.
        splits: our splits in terms of the source's.
        form: how a row becomes a prompt.
        subset: the source's configuration.
        revision: branch or commit.
        files: which files hold a split, where the repository holds more.
    """

    hub: str
    licence: str
    splits: Mapping[str, Part]
    form: Form
    subset: str | None = None
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def _dev_of_train(share: float) -> dict[str, Part]:
    """The source's own test split, and a dev split that is cut from its train split."""
    cut = Part("train", 0, share)
    return {"train": Part("train", share, 1), "dev": cut, "test": Part("test")}


_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{{instruction}}\n\n{input}### Response:\n"
)
_WMT = "Translate the input English sentence into German.\nInput: {translation.en}\nOutput:"
_OWN = {"train": Part("train"), "dev": Part("validation"), "test": Part("test")}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

CATALOGUE: Mapping[str, CataloguedSet] = {
    "alpaca": CataloguedSet(  # Taori et al., Stanford Alpaca, 2023
        # Sizes as in SpecDec++ (40k/10k/2k of 52k); which prompts are in which is ours.
        hub="tatsu-lab/alpaca",
        licence="cc-by-nc-4.0",
        splits={
            "test": Part("train", 0, 2 / 52),
            "dev": Part("train", 2 / 52, 12 / 52),
            "train": Part("train", 12 / 52, 1),
        },
        form=Form(
            ask=("{instruction}\n\n{input}", "{instruction}"),
            plain=(
                _ALPACA.format(
                    more=", paired with an input that provides further context",
                    input="### Input:\n{input}\n\n",
                ),
                _ALPACA.format(more="", input=""),
            ),
        ),
    ),
    "sharegpt": CataloguedSet(  # ShareGPT conversations as used by Vicuna, Chiang et al., 2023
        # The papers give no split: 96/2/2 by conversation is ours.
        hub="anon8231489123/ShareGPT_Vicuna_unfiltered",
        licence="apache-2.0 (of the collection; the texts are users' and ChatGPT's)",
        splits={
            "test": Part("train", 0, 0.02),
            "dev": Part("train", 0.02, 0.04),
            "train": Part("train", 0.04, 1),
        },
        form=Form(messages="conversations", roles=SHAREGPT_ROLES, keys=("from", "value")),
        files={"train": "ShareGPT_V3_unfiltered_cleaned_split.json"},
    ),
    "gsm8k": CataloguedSet(  # Cobbe et al., arXiv 2110.14168
        # Dev is 5 % of the source's train split (ours).
        hub="openai/gsm8k",
        licence="mit",
        splits=_dev_of_train(0.05),
        form=Form(
            ask=("{question}",), plain=("Question: {question}\nAnswer:",), reference="{answer}"
        ),
        subset="main",
    ),
    "humaneval": CataloguedSet(  # Chen et al., arXiv 2107.03374
        # The chat wording is ours.
        hub="openai/openai_humaneval",
        licence="mit",
        splits={"test": Part("test")},
        form=Form(
            ask=("Complete the following Python function.\n\n```python\n{prompt}```",),
            plain=("{prompt}",),
        ),
    ),
    "wmt-en-de": CataloguedSet(  # Bojar et al., WMT 2014
        # MCSD's template, without its last space.
        hub="wmt/wmt14",
        licence="unknown",
        splits=_OWN,
        form=Form(ask=(_WMT,), plain=(_WMT,), reference="{translation.de}"),
        subset="de-en",
        files={name: f"de-en/{name}-*" for name in ("train", "validation", "test")},
    ),
    "xsum": CataloguedSet(  # Narayan et al., arXiv 1808.08745
        # The wording is ours.
        hub="EdinburghNLP/xsum",
        licence="unknown",
        splits=_OWN,
        form=Form(
            ask=("Summarize the following article in one sentence.\n\n{document}",),
            plain=("Article: {document}\n\nSummary in one sentence:",),
            reference="{summary}",
        ),
        revision=PARQUET_EXPORT,
        files=_EXPORTED,
    ),
    "dolly": CataloguedSet(  # Conover et al., Databricks, 2023
        # The paper gives no split: 13/1/1 is ours, and so is the use of Alpaca's wording.
        hub="databricks/databricks-dolly-15k",
        licence="cc-by-sa-3.0",
        splits={
            "test": Part("train", 0, 1 / 15),
            "dev": Part("train", 1 / 15, 2 / 15),
            "train": Part("train", 2 / 15, 1),
        },
        form=Form(
            ask=("{instruction}\n\n{context}", "{instruction}"),
            plain=(
                _ALPACA.format(
                    more=", paired with an input that provides further context",
                    input="### Input:\n{context}\n\n",
                ),
                _ALPACA.format(more="", input=""),
            ),
            reference="{response}",
        ),
    ),
    "mt-bench": CataloguedSet(  # Zheng et al., arXiv 2306.05685
        # 80 questions of two turns.
        hub="HuggingFaceH4/mt_bench_prompts",
        licence="apache-2.0",
        splits={"test": Part("train")},
        form=Form(plain=("USER: {prompt.0}\nASSISTANT:",), questions="prompt"),
    ),
    "spec-bench": CataloguedSet(  # Xia et al., Findings of ACL 2024, arXiv 2401.07851
        # Not on the Hub as far as we know: `source` must be a downloaded question.jsonl.
        hub="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/"
        "question.jsonl",
        licence="apache-2.0 (of the collection; its questions come from six data sets)",
        splits={"test": Part("train")},
        form=Form(plain=("USER: {turns.0}\nASSISTANT:",), questions="turns"),
    ),
    "lm1b": CataloguedSet(  # Chelba et al., arXiv 1312.3005
        # The first half of a sentence's words is the prompt (ours; the paper does not say).
        hub="billion-word-benchmark/lm1b",
        licence="none stated",
        splits={"train": Part("train"), "test": Part("test")},
        form=Form(plain=("{text}",), keep=0.5),
        revision=PARQUET_EXPORT,
        files=_EXPORTED,
    ),
    "webqa": CataloguedSet(  # Berant et al., EMNLP 2013
        # WebQuestions; dev is 10 % of the source's train split (ours).
        hub="stanfordnlp/web_questions",
        licence="unknown",
        splits=_dev_of_train(0.1),
        form=Form(ask=("{question}",), plain=("Question: {question}\nAnswer:",)),
    ),
    "piqa": CataloguedSet(  # Bisk et al., arXiv 1911.11641
        # The goal is asked as an open question (ours).
        hub="ybisk/piqa",
        licence="unknown",
        splits=_OWN,
        form=Form(ask=("{goal}",), plain=("Question: {goal}\nAnswer:",)),
        revision=PARQUET_EXPORT,
        files=_EXPORTED,
    ),
}
