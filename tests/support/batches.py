"""Methods that batches and captured graphs are tested with."""

from eval.decoder import DecodeConfig

CASES = {
    "chain": DecodeConfig(length=4),
    "greedy": DecodeConfig(length=4, temperature=0.0),
    "greedy_block": DecodeConfig(verifier="greedy_block", length=4),
    "confidence": DecodeConfig(stop="confidence", threshold=0.3),
    "head": DecodeConfig(stop="head", threshold=0.5),
    "cost": DecodeConfig(stop="cost", draft_seconds=0.1, token_seconds=1.0),
    "tree": DecodeConfig(verifier="rrs", drafter="tree", widths=(3, 2)),
    "dynamic tree": DecodeConfig(
        verifier="naive", drafter="dynamic_tree", nodes=5, depth=3, gain=0.1
    ),
    "paths": DecodeConfig(verifier="kseq", drafter="paths", paths=3, length=3),
    "lookup": DecodeConfig(drafter="lookup", lookup=3, match=1),
    "lookup, tree": DecodeConfig(
        verifier="traversal", drafter="tree", widths=(2, 2), lookup=3, match=1
    ),
    "plain": DecodeConfig(),
}
