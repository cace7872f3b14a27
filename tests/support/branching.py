"""What several files of tests use of `test_branching`."""

import torch

from eval.analysis.forms import FORMS
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.verifiers import VERIFIERS
from specdata.probability import SamplingConfig
from tests.support.decoder import head
from tests.support.tiny import tiny_llama

# The first of these kinds that a verifier takes shows its caches and rows.
SMALL = ("tree 2x2x1", "tree 2x2x1, distinct", "tree 4x2x2, greedy", "2 paths of 4", "chain of 4")


def decoded_with(name: str) -> DecodeConfig:
    spec, sampling = VERIFIERS[name], SamplingConfig()
    kind = next(FORMS[kind] for kind in SMALL if FORMS[kind].config(sampling).kind in spec.takes)
    return kind.config(sampling, name, **spec.grid[0])


# A case of each lossless verifier, ends that depend on tokens, and paths of two distributions.
CASES = {name: decoded_with(name) for name, spec in VERIFIERS.items() if spec.lossless} | {
    "token, ended by a head": DecodeConfig("token", stop="head", threshold=0.6),
    "block, ended by confidence": DecodeConfig("block", stop="confidence", threshold=0.5),
    "independent paths": DecodeConfig(
        "importance", drafter="paths", paths=2, length=2, path_temperatures=(1.0, 1.6)
    ),
}


# Beside them no draft, a warped sampler, trees that draw nothing.
SAMPLED = CASES | {
    "plain": DecodeConfig(),
    "warped": DecodeConfig(length=3, temperature=0.7, top_k=3, top_p=0.9, min_p=0.2),
    "dynamic tree": DecodeConfig(
        verifier="naive", drafter="dynamic_tree", nodes=4, depth=3, temperature=0.2, top_p=0.9
    ),
}


def greedy_rounds(config: DecodeConfig) -> int:
    """Decode four prompts greedily, which must give the text of `generate`: rounds in all."""
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(2, vocab=40, layers=1)
    decoder, rounds = SpeculativeDecoder.from_config(target, draft, config, head()), 0
    for start in range(2, 6):
        prompt = torch.tensor([start, 5, start + 7])
        plain = target.generate(
            prompt.unsqueeze(0),
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
        )
        out = decoder.generate(prompt, max_new_tokens=24, generator=torch.Generator())
        assert out.tokens.tolist() == plain[0, 3:].tolist()
        rounds += len(out.rounds)
    return rounds
