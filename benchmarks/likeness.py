"""How alike the prompts of `make real` are to its training prompts: docs/evidence/likeness.json.

    python benchmarks/likeness.py [--out FILE]

Every test prompt is new, but a program wrote all of them out of phrases. So names and numbers are
masked in both, and of each test prompt the most similar training prompt of any set is found: the
ratio of difflib's SequenceMatcher over words, 2 M / T for M words in common blocks of T in both.
"""

from __future__ import annotations

import argparse
import re
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median

import yaml

from eval.measuring.environment import describe_environment
from specdata.prompts.catalogue import natural_prompts
from specdata.storage.files import write_json

CONFIG = Path("recipes/configs/smollm2-135m.yaml")
ALIKE = 0.8
WORD = re.compile(r"[^\W\d_]+|\d[\d.,]*|\S")


def masked(texts: list[str]) -> list[list[str]]:
    """The words of texts; numbers are 0, and names, which stand nowhere in lower case, are N."""
    split = [WORD.findall(text) for text in texts]
    lower = {word for words in split for word in words if word.islower()}
    return [
        [
            "N" if word.istitle() and word.lower() not in lower else re.sub(r"^\d.*", "0", word)
            for word in words
        ]
        for words in split
    ]


def most_alike(words: list[str], others: list[list[str]]) -> float:
    """The largest ratio of a text to any of the others."""
    best, matcher = 0.0, SequenceMatcher(autojunk=False)
    matcher.set_seq2(words)
    for other in others:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best:
            best = max(best, matcher.ratio())
    return best


def main() -> None:
    """Compare the prompts that the configuration names; print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/likeness.json"))
    options = parser.parse_args()
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))

    def texts(section: str, split: str) -> dict[str, list[str]]:
        return {
            each["name"]: natural_prompts(each["name"], split, each["count"], seed=config["seed"])
            for each in config[section]["sets"]
            if each["split"] == split
        }

    train, test = texts("rollouts", "train"), texts("eval", "test")
    read = [text for of_set in train.values() for text in of_set]
    words = masked([*read, *(text for of_set in test.values() for text in of_set)])
    learnt, rest = words[: len(read)], iter(words[len(read) :])
    made = {}
    for name, prompts in test.items():
        ratios = [most_alike(next(rest), learnt) for _ in prompts]
        share = sum(ratio >= ALIKE for ratio in ratios) / len(ratios)
        made[name] = {"prompts": len(ratios), "alike": share, "median": median(ratios)}
        print(f"{name}: {share:.0%} have a training prompt of {ALIKE} or more")
    about = describe_environment(device="cpu", dtype="none").model_dump(mode="json")
    kept = {name: about[name] for name in ("git_commit", "git_dirty", "date")}
    write_json(
        options.out,
        {"command": "python benchmarks/likeness.py", "config": str(CONFIG), **kept}
        | {"training_prompts": len(read), "least_ratio": ALIKE, "sets": made},
    )


if __name__ == "__main__":
    main()
