"""`generate` prints what the pair decodes, marks what was drafted, and says what it cannot do."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.results import write_results
from recipes.command import main
from recipes.tools import generate
from specdata.models import load_model, load_tokenizer
from specdata.prompts.chat_templates import text_ids
from tests.support.synthetic_results import only, synthetic_results

PROMPT = "Instruction: say 4."


def test_an_answer_is_streamed_as_the_method_decodes_it_and_marked_where_it_was_drafted(
    trained_pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    target, draft = (str(trained_pair / name) for name in ("target", "draft"))
    values = {
        "output": "out",
        "models": {"target": target, "draft": draft},
        "rollouts": {"sets": []},
        "sampling": {"temperature": 0.5},
        "eval": {
            "sets": [{"name": "instruct"}],
            "methods": [
                {"name": "plain", "decoder": "plain"},
                {"name": "K=3", "length": 3},
                {"name": "lookup", "verifier": "naive", "drafter": "lookup", "lookup": 4},
                {"name": "cost", "stop": "cost"},  # of a run without a head
            ],
        },
    }
    Path("mine.yaml").write_text(yaml.safe_dump(values))
    tokenizer = load_tokenizer(target)
    ids = torch.tensor(text_ids(tokenizer, [PROMPT], is_chat=False)[0])
    config = DecodeConfig(length=3, temperature=0.5)
    decoder = SpeculativeDecoder.from_config(load_model(target), load_model(draft), config)
    out = decoder.generate(ids, max_new_tokens=40, generator=torch.Generator().manual_seed(7))
    text = tokenizer.decode(out.tokens, skip_special_tokens=True)

    asked = ["generate", "mine.yaml", "--prompt", PROMPT, "--max-new-tokens", "40", "--seed", "7"]
    capsys.readouterr()
    assert main(asked) == 0
    shown, noise = capsys.readouterr()
    assert "Loading weights" not in noise
    assert shown.startswith(f"{text}\nK=3: {40 / len(out.rounds):.2f} tokens per target call, ")
    assert re.search(r"tokens/s, [\d.]+ times the target alone \([\d.]+\)", shown)
    monkeypatch.setattr(
        generate, "console", Console(force_terminal=True, color_system="standard", soft_wrap=True)
    )
    assert main(asked) == 0
    marked = capsys.readouterr().out
    green = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", marked, re.DOTALL)
    assert len(green) == sum(each.accepted for each in out.rounds) > 0
    assert all(main([*asked, "--method", name]) == 0 for name in ("lookup", "cost"))
    assert main([*asked, "--method", "K=4"]) == 2
    assert "did you mean 'K=3'" in capsys.readouterr().err
    results = only(synthetic_results("alpaca"), "plain", "fixed-4", "biased-0.05")
    Path("out/eval").mkdir(parents=True)
    write_results(Path("out/eval/results.json"), results)
    assert main(asked) == 0
    assert "\nfixed-4: " in capsys.readouterr().out  # lossless, and added by dev
    values |= {"draft": {"epochs": 1}}
    Path("mine.yaml").write_text(yaml.safe_dump(values))
    assert main(asked) == 2
    assert "run draftsmith train-draft mine.yaml first" in capsys.readouterr().err
