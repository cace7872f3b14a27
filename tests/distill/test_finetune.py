"""Fine-tuning on texts: what is learnt, what is refused, what survives."""

import copy
import json
import shutil
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional

from distill.config import FinetuneConfig
from distill.finetune import TuningRows, collate_texts, finetune, finetune_trainer, make_rows
from distill.toy import language_model
from distill.training import save_model
from recipes.config import parse
from recipes.initial_draft import Finetuned
from recipes.make_rollouts import Rollouts
from recipes.run import run_stage
from recipes.run_eval import Eval
from recipes.train_draft import Draft
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.errors import ConfigError, OtherSettingsError
from specdata.models import load_model, load_tokenizer
from specdata.prompts.chat_templates import assistant_mask, chat_ids
from specdata.saving import copy_tokenizer
from specdata.storage.dataset import load_stored
from specdata.texts import IGNORED
from specdata.toy.corpus import examples
from tests.support.chats import chat_tokenizer
from tests.support.families import PARTS, REFUSED, build, classes
from tests.support.trainings import assert_same_gradients
from tests.support.trainings import step_gradients as gradients_of

REPOSITORY = Path(__file__).parents[2]
TALK = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because 3 + 2 is 5, too."},
]
QUESTION = TALK[:1]
# A head of its own, a body of another name, a router, attention with sinks.
QUICK = ("modernbert-decoder", "llama4_text", "granitemoe", "gpt_oss")
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
    for name in classes()
    if name not in {*REFUSED, *PARTS}  # parts are in no folder by themselves
]


def config(*conversations: Path, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig(
        **{
            "conversations": [str(path) for path in conversations],
            "epochs": 2,
            "max_length": 512,
            "batch_size": 4,
            "learning_rate": 3e-3,
            **changes,
        }
    )


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talks(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": example.prompt},
                {"role": "assistant", "content": example.completion.strip()},
            ]
        }
        for example in islice(examples("maths", 3), count)
    ]


def rollouts(count: int) -> Dataset:
    tokenizer = chat_tokenizer("chatml")
    return Dataset.from_list(
        [
            {
                "prompt_ids": tokenizer(example.prompt)["input_ids"],
                "completion_ids": tokenizer(example.completion, add_special_tokens=False)[
                    "input_ids"
                ],
            }
            for example in islice(examples("maths", 4), count)
        ]
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with random weights, and a target of which the tokenizer is all that is used."""
    folder = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 1), ("draft", 2)):
        model = language_model(chat_tokenizer("chatml"), layers=1, width=32, seed=seed)
        save_model(model, folder / name)
        chat_tokenizer("chatml").save_pretrained(folder / name)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return lines(tmp_path / "talks.jsonl", talks(40))


def tuned(
    pair: Path,
    out: Path,
    config: FinetuneConfig,
    texts: Dataset | None = None,
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    return finetune(
        target=pair / "target",
        draft=pair / "draft",
        rollouts=rollouts(30) if texts is None else texts,
        out=out,
        config=config,
        lora=None,
        seed=seed,
        save_steps=100,
        **more,
    )


def made(config: FinetuneConfig, family: str = "chatml") -> TuningRows:
    return make_rows(chat_tokenizer(family), rollouts(30), config, seed=0)


def learnt(rows: TuningRows) -> list[str]:
    """The content of the labels of each row."""
    tokenizer = chat_tokenizer("chatml")
    return [
        tokenizer.decode([label for label in row["labels"] if label != IGNORED])
        for row in rows.dataset
    ]


@pytest.mark.parametrize("family", ["chatml", "marked", "llama3"])
def test_only_what_the_assistant_says_is_learnt(family: str, tmp_path: Path) -> None:
    rows = made(config(lines(tmp_path / "a.jsonl", [{"messages": TALK}])), family)
    end = "<|eot_id|>" if family == "llama3" else "<|im_end|>"
    assert learnt(rows) == [f"It is 5.{end}Because 3 + 2 is 5, too.{end}"]
    (row,) = rows.dataset
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (IGNORED, token)
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TALK]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "a_0", "conversations": turns}]))
    assert made(config(path), family).dataset[:] == rows.dataset[:]
    assert rows.account["tokens"] == len(row["input_ids"])
    assert rows.account["assistant_tokens"] == sum(label != IGNORED for label in row["labels"])


def test_of_rollouts_only_the_completion_is_learnt() -> None:
    rows = made(config())
    assert rows.account["texts"] == "rollouts"
    for row, given in zip(rows.dataset, rollouts(30), strict=True):
        prompt, completion = given["prompt_ids"], given["completion_ids"]
        assert row["input_ids"] == prompt + completion
        assert row["labels"] == [IGNORED] * len(prompt) + completion


def step_gradients(pair: Path, work: Path, config: FinetuneConfig) -> dict[str, Tensor]:
    """Gradients of a step on all texts, through the trainer that `finetune` uses."""
    student, tokenizer = load_model(str(pair / "draft")), load_tokenizer(str(pair / "target"))
    trainer = finetune_trainer(student, tokenizer, made(config), work, config, 0, 100)
    return {name.removeprefix("module."): each for name, each in gradients_of(trainer).items()}


def test_accumulated_texts_give_the_gradient_of_one_batch(
    pair: Path, file: Path, tmp_path: Path
) -> None:
    whole = step_gradients(pair, tmp_path / "whole", config(file, epochs=1, batch_size=64))
    parts = config(file, epochs=1, batch_size=5, accumulation=8)
    assert_same_gradients(whole, step_gradients(pair, tmp_path / "parts", parts), 2000)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_that_decodes_learns_by_its_own_loss(
    name: str, pair: Path, tmp_path: Path
) -> None:
    """Through its own head and no loss of its router."""
    texts = [[2 + (7 * n + i * (n + 3)) % 90 for i in range(12 + 9 * n)] for n in range(3)]
    rows = Dataset.from_list([{"prompt_ids": x[:3], "completion_ids": x[3:]} for x in texts])
    save_model(build(name), tmp_path / "draft")
    copy_tokenizer(str(pair / "target"), tmp_path / "draft")
    shutil.copytree(tmp_path / "draft", tmp_path / "target")  # some kinds add a token

    @torch.inference_mode()
    def own_loss(folder: Path) -> float:
        model, losses = load_model(str(folder)), []
        for ids in map(torch.tensor, texts):
            logits = model(ids[None], use_cache=False).logits[0]
            losses.append(functional.cross_entropy(logits[2:-1], ids[3:], reduction="none"))
        return float(torch.cat(losses).mean())

    once = config(epochs=1, max_length=64, batch_size=4, warmup_ratio=0.0, learning_rate=1e-3)
    result = tuned(tmp_path, tmp_path / "out", once, rows)
    own = own_loss(tmp_path / "draft")
    assert result["loss_first"] == pytest.approx(own, abs=1e-3)
    assert own_loss(tmp_path / "out") < result["loss_first"]


def test_long_texts_become_several_and_no_token_is_lost(tmp_path: Path) -> None:
    question, answer = QUESTION[0], {"role": "assistant", "content": "5, I think. " * 20}
    path = lines(tmp_path / "a.jsonl", [{"messages": [question, answer]}])
    (whole,) = made(config(path)).dataset
    length = 60
    rows = made(config(path, max_length=length))
    assert rows.account["split"] == 1
    assert rows.account["rows"] == -(-len(whole["input_ids"]) // length) > 2
    parts = [*rows.dataset]
    assert [*chain.from_iterable(part["input_ids"] for part in parts)] == whole["input_ids"]
    for index, row in enumerate(parts):
        # All is learnt as it was, but for a token that nothing stands before.
        part = slice(index * length + 1, (index + 1) * length)
        assert row["labels"] == [IGNORED, *whole["labels"][part]]
    # Of a part in which the assistant says nothing, nothing can be learnt.
    assert made(config(path, max_length=20)).account["tokens"] < len(whole["input_ids"])


def test_the_collator_learns_nothing_beyond_the_vocabulary_and_divides_rows() -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, 9]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ]
    batch = collate_texts(0, 9)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0], [5, 6, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, -100], [-100, 6, -100, -100, -100]]
    shares = [collate_texts(0, 10, process=i, processes=3)(rows) for i in range(3)]
    assert [share["labels"].shape for share in shares] == [(1, 5), (1, 2), (1, 2)]
    assert (shares[2]["labels"] == IGNORED).all()


def test_what_cannot_be_learnt_is_left_out_and_said(tmp_path: Path) -> None:
    odd = [{"role": "narrator", "content": "5"}, *TALK]
    late = [{"role": "assistant", "content": "Ask."}, *TALK]
    rows = [QUESTION, TALK, odd, [{"role": "user", "content": None}], late, QUESTION]
    path = lines(tmp_path / "a.jsonl", [{"messages": row} for row in rows])
    account = made(config(path), "gemma").account
    assert (account["read"], account["used"]) == (6, 1)
    (said,) = account["left_out"]
    assert f"{path}: 2 without a turn of the assistant (the first is row 1)" in said
    assert "1 with a role that is not known (the first is row 3)" in said
    assert "1 not made of texts (the first is row 4)" in said
    assert "1 refused by the chat template (the first is row 5: " in said


def test_unusable_texts_are_refused_with_the_reason(pair: Path, tmp_path: Path) -> None:
    def refused(path: Path, family: str = "chatml") -> str:
        with pytest.raises(ConfigError) as error:
            made(config(path), family)
        return str(error.value)

    silent = lines(tmp_path / "silent.jsonl", [{"messages": QUESTION}] * 3)
    assert "none of 3 can be trained on: 3 without a turn of the assistant" in refused(silent)
    prompts = lines(tmp_path / "prompts.jsonl", [{"prompt": "Hello"}])
    assert "row 1, has no column 'messages'; it has 'prompt'" in refused(prompts)
    good = lines(tmp_path / "good.jsonl", [{"messages": TALK}])
    assert "has no chat template" in refused(good, "none")
    space = [QUESTION[0], {"role": "assistant", "content": "At the harbour."}]
    strips = lines(tmp_path / "strips.jsonl", [{"messages": space}])
    assert "1 whose chat template hides what the assistant said" in refused(strips, "spaced")
    assert "'instruct' holds prompts, no conversations" in refused(Path("instruct"))
    nothing = Dataset.from_dict({"prompt_ids": [[5, 6]], "completion_ids": [[]]})
    with pytest.raises(ConfigError, match="no token is left to train on"):
        make_rows(chat_tokenizer("chatml"), nothing, config(), seed=0)
    with pytest.raises(ConfigError, match=r"max_length must be at most 1024.*got 1025"):
        tuned(pair, tmp_path / "out", config(good, max_length=1025))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.smoke
@pytest.mark.slow
def test_a_draft_learns_conversations_and_becomes_an_ordinary_folder(
    pair: Path, file: Path, tmp_path: Path
) -> None:
    wanted = config(file, epochs=4)
    result = tuned(pair, tmp_path / "draft", wanted)
    rows = made(wanted).account
    assert {name: result[name] for name in rows} == rows
    assert result["loss_last"] < 0.8 * result["loss_first"]
    assert load_model(str(tmp_path / "draft")).config.use_cache
    ids = (tmp_path / "draft" / "tokenizer.json").read_bytes()
    assert ids == (pair / "target" / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "talks.jsonl"]
    # A finished one is read, not run again.
    written = (tmp_path / "draft" / "model.safetensors").stat()
    assert tuned(pair, tmp_path / "draft", wanted) == result
    assert (tmp_path / "draft" / "model.safetensors").stat() == written


def test_a_frozen_embedding_stays_as_it_is(pair: Path, file: Path, tmp_path: Path) -> None:
    draft, untied = load_model(str(pair / "draft")), tmp_path / "pair"
    reduce_vocabulary(draft, range(0, 409, 2))
    save_model(draft, untied / "draft")
    for name in ("draft", "target"):
        chat_tokenizer("chatml").save_pretrained(untied / name)
    shutil.copytree(pair / "target", untied / "target", dirs_exist_ok=True)
    tuned(untied, tmp_path / "draft", config(file), freeze_embeddings=True)
    before, after = (load_model(str(each / "draft")) for each in (untied, tmp_path))
    same = {
        name: torch.equal(weight, after.get_parameter(name))
        for name, weight in before.named_parameters()
    }
    assert [name for name, is_same in same.items() if is_same] == ["model.embed_tokens.weight"]


def test_a_draft_with_a_reduced_vocabulary_learns_what_it_can_propose(
    pair: Path, file: Path, tmp_path: Path
) -> None:
    """Its loss is that of the same draft with all rows, over the tokens that are kept."""
    whole, tokenizer = load_model(str(pair / "draft")), load_tokenizer(str(pair / "target"))
    rows, kept = made(config(file)), list(range(0, 409, 2))
    reduced = copy.deepcopy(whole)
    reduce_vocabulary(reduced, kept)
    trainer = finetune_trainer(reduced, tokenizer, rows, tmp_path / "work", config(file), 0, 100)
    batch = trainer.data_collator([rows.dataset[0], rows.dataset[1]])
    labels = collate_texts(0, 409)([rows.dataset[0], rows.dataset[1]])["labels"][:, 1:]
    with torch.no_grad():
        ours = trainer.compute_loss(trainer.model, dict(batch))
        nothing = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
        assert trainer.compute_loss(trainer.model, nothing) == 0
        del batch["labels"]
        logits = whole(**batch, use_cache=False).logits[:, :-1]
    proposable = torch.isin(labels, torch.tensor(kept))
    assert 0 < proposable.sum() < (labels != IGNORED).sum()
    among = logits[..., kept].log_softmax(-1)[proposable]
    expected = -among.gather(-1, labels[proposable, None] // 2).mean()
    torch.testing.assert_close(ours, expected)


def shipped(pair: Path, tmp_path: Path, *arguments: str) -> list[str]:
    """The shipped configuration on a pair that is here."""
    return [
        *("--config", str(REPOSITORY / "recipes/configs/vicuna-68m.yaml")),
        *("--output", str(tmp_path / "run")),
        *("--models.target", str(pair / "target"), "--models.draft", str(pair / "draft")),
        "--rollouts.sets",
        "[{name: maths, split: train, count: 1}, {name: maths, split: dev, count: 1}]",
        *arguments,
    ]


def test_vicunas_template_is_fastchats_and_hides_no_answer() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.chat_template = (REPOSITORY / "recipes/configs/vicuna.jinja").read_text("utf-8")
    ids, mask = assistant_mask(tokenizer, TALK)
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions."
    )
    # fastchat/conversation.py, vicuna_v1.1: sep " ", sep2 the end token.
    assert tokenizer.decode(ids) == (
        f"<bos>{system} USER: What is 2 + 3? ASSISTANT: It is 5.<eos>USER: Why? ASSISTANT: "
        "Because 3 + 2 is 5, too.<eos>"
    )
    learnt = [token for token, bit in zip(ids, mask, strict=True) if bit]
    assert tokenizer.decode(learnt) == " It is 5.<eos> Because 3 + 2 is 5, too.<eos>"
    assert tokenizer.decode(chat_ids(tokenizer, TALK[:3])).endswith("<eos>USER: Why? ASSISTANT:")


def test_every_stage_gives_the_chat_template_what_the_run_says_and_stores_it(
    pair: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(pair, tmp_path / "own")
    template = own / "target" / "chat_template.jinja"
    needs = "{% if mode is not defined %}{{ raise_exception('no mode') }}{% endif %}{{ mode }}"
    template.write_text(needs + template.read_text())
    path, sets, rows = tmp_path / "train.jsonl", [], talks(8)
    for split, part in (("train", rows[:4]), ("dev", rows[4:6]), ("test", rows[6:])):
        sets.append(f"{{name: {lines(tmp_path / f'{split}.jsonl', part)}, split: {split}}}")
    changes = [
        *("--draft.finetune.conversations", f"[{path}]", "--draft.finetune.max_length", "256"),
        *("--rollouts.sets", f"[{', '.join(sets[:2])}]", "--eval.sets", f"[{sets[2]}]"),
        *("--models.dtype", "float32", "--eval.methods", "[{name: plain, decoder: plain}]"),
        *("--rollouts.max_new_tokens", "2", "--eval.max_new_tokens", "2"),
        *("--chat_template_kwargs", "{mode: Be brief.}"),
    ]
    wanted = parse(shipped(own, tmp_path, *changes)).config
    for stage in (Rollouts(wanted), Finetuned(wanted), Draft(wanted), Eval(wanted)):
        run_stage(stage)
        stored = json.loads((stage.folder / "run.json").read_text())["settings"]
        assert stored["chat_template_kwargs"] == {"mode": "Be brief."}
    prompts = load_stored(tmp_path / "run/rollouts")["prompt_ids"]
    tokenizer = chat_tokenizer("chatml")
    assert {tokenizer.decode(ids)[:9] for ids in prompts} == {"Be brief."}
    other = parse(shipped(own, tmp_path, *changes[:-1], "{mode: Think.}")).config
    with pytest.raises(OtherSettingsError, match=r"chat_template_kwargs\.mode: 'Be brief\.' ->"):
        run_stage(Rollouts(other))
