"""Models in OpenVINO GenAI: converted, and served with the API of vLLM.

    PYTHON recipes/in_openvino.py convert FOLDER TARGET [DRAFT] [--int8] [--taps 2 15 27]
    PYTHON recipes/in_openvino.py serve TARGET [--draft DRAFT | --match 3] [--length 3] [--port N]

PYTHON has OpenVINO in it (`make .venv-openvino/installed`); nothing of ours is imported here.
`draftsmith export --for openvino` runs the first. The second takes and gives token ids, one request
at a time, and counts as vLLM does (/metrics), so `draftsmith engine` and `certify` can ask it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Of the CPU, which by default computes in bfloat16 where it can, and stores 16 or 8 bits."""
KV_BLOCKS = 64
"""Of the cache, of 32 tokens: a prompt and its text have 2,048 together."""


def convert(model: str, out: Path, taps: list[int], *, int8: bool = False) -> Any:
    """Write a model as GenAI loads it, with its tokenizer; weights are of 32 or of 8 bits.

    A draft in EAGLE-3's layout has `taps`, the layers of its target before which states are read.
    Returns its (V, E) input embedding.
    """
    import nncf
    import torch
    from openvino import Core, save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.exporters.openvino.convert import export_from_model
    from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
    from optimum.intel.openvino import OVConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Loaded here: `main_export` would ask to trust remote code and import all that its file names.
    class Eagle3(LlamaEagle3ForCausalLM):  # type: ignore[misc]
        """Of this module: of a class of its own the exporter does not know the library."""

    kind = Eagle3 if taps else AutoModelForCausalLM
    loaded, report = kind.from_pretrained(
        model, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    maps = {"model.d2t", "model.t2d"} & {*report["missing_keys"]}
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]} - maps):
        raise SystemExit(f"{model} has other tensors than OpenVINO computes with: {wrong[0]}")
    if maps:  # a draft of all tokens, which stores none: they would be any memory
        loaded.model.d2t.zero_()
        loaded.model.t2d.fill_(True)
    task, config = "text-generation-with-past", OVConfig(dtype="fp32")
    export_from_model(loaded, out, task=task, ov_config=config)
    file, made = out / "openvino_model.xml", Core().read_model(out / "openvino_model.xml")
    if taps:  # GenAI reads states behind layers, by default behind the layers of EAGLE's taps
        made.set_rt_info([tap - 1 for tap in taps], "hidden_layers_list")
    made = nncf.compress_weights(made) if int8 else made
    save_model(made, out / "made.xml", compress_to_fp16=False)
    del made  # which reads the file that is replaced
    for suffix in (".xml", ".bin"):
        (out / "made").with_suffix(suffix).replace(file.with_suffix(suffix))
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.save_pretrained(out)
    parts = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
        save_model(part, out / f"openvino_{name}.xml")
    return loaded.get_input_embeddings().weight


class OpenVinoEngine:
    """A pipeline of a target: alone, with a draft, or looking tokens up in its prompt."""

    def __init__(self, given: argparse.Namespace) -> None:
        import openvino_genai as genai

        self.genai, self.given, self.busy = genai, given, Lock()
        self.counted: Counter[int | str] = Counter()
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.cache_size = KV_BLOCKS, 0
        scheduler.enable_prefix_caching = False  # with it, sampling with a draft raises
        more: dict[str, Any] = {"prompt_lookup": True} if given.match else {}
        if given.draft:
            more["draft_model"] = genai.draft_model(given.draft, "CPU", **PROPERTIES)
        more |= {"scheduler_config": scheduler, **PROPERTIES}
        self.pipeline = genai.LLMPipeline(given.target, "CPU", **more)

    def complete(self, body: dict[str, Any]) -> list[int]:
        """The tokens that follow a prompt."""
        import numpy as np
        from openvino import Tensor

        config, ends = self.genai.GenerationConfig(), body.get("stop_token_ids") or []
        config.max_new_tokens, config.ignore_eos = body["max_tokens"], not ends
        if ends:
            config.eos_token_id, config.stop_token_ids = ends[0], {*ends}
        if body["temperature"] > 0:
            config.do_sample, config.rng_seed = True, body["seed"] % 2**32
            config.temperature, config.top_k = body["temperature"], body["top_k"]
            config.top_p, config.min_p = body["top_p"], body["min_p"]
        if self.given.draft or self.given.match:
            config.num_assistant_tokens = self.given.length
        if self.given.match:
            config.max_ngram_size = self.given.match
        ids = np.array([body["prompt"]], dtype=np.int64)
        inputs = self.genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        with self.busy:
            found = self.pipeline.generate(inputs, config)
            self.count(found, body["max_tokens"])
        tokens: list[int] = [*found.tokens[0]]
        return tokens

    def count(self, found: Any, budget: int) -> None:
        """Count the rounds of a text: the forward of its prompt drafts nothing.

        An end token ends a text as a token of the target, drafted or not. The last round is not
        among the drafted tokens that GenAI counts; those that a lookup found and the target
        refused are counted nowhere.
        """
        rounds = found.perf_metrics.raw_metrics.m_batch_sizes[1:]
        if self.given.draft and rounds:
            last = min(self.given.length, budget - 2 - sum(rounds[:-1]))
            drafted = found.extended_perf_metrics.get_num_draft_tokens() + last
            self.counted.update(drafts=len(rounds) - (last == 0), draft_tokens=drafted)
        elif self.given.match:
            rounds = [new for new in rounds if new > 1]
            self.counted.update(drafts=len(rounds), draft_tokens=sum(rounds) - len(rounds))
        else:
            return
        self.counted.update(place for new in rounds for place in range(new - 1))

    def metrics(self) -> str:
        """What was counted, by vLLM's names."""
        begin, lines = "vllm:spec_decode_num_", []
        for name, count in self.counted.items():
            of = name if isinstance(name, str) else "accepted_tokens_per_pos"
            label = "" if isinstance(name, str) else f'{{position="{name}"}}'
            lines.append(f"{begin}{of}_total{label} {count}\n")
        return "".join(lines)


def handler(engine: OpenVinoEngine) -> type[BaseHTTPRequestHandler]:
    """What answers /health, /v1/models, /metrics and /v1/completions."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            models = {"data": [{"id": "target", "owned_by": "openvino"}]}
            pages = {"/health": "", "/v1/models": json.dumps(models), "/metrics": engine.metrics()}
            self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                choice = {"token_ids": engine.complete(body)}
            except (RuntimeError, ValueError) as error:  # of GenAI, which refuses or fails
                self.answer(400, str(error))
            else:
                self.answer(200, json.dumps({"choices": [choice]}))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing of requests."""

    return Handler


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("convert").add_argument
    add("out", type=Path, help="a folder, for those of target and draft")
    add("target")
    add("draft", nargs="?")
    add("--taps", type=int, nargs=3, default=[], help="of a draft in EAGLE-3's layout")
    add("--int8", action="store_true", help="weights of 8 bits")
    add = commands.add_parser("serve").add_argument
    add("target")
    add("--draft")
    add("--length", type=int, default=3, help="tokens to draft at most (default: 3)")
    add("--match", type=int, default=0, help="draft what followed the last so many tokens")
    add("--port", type=int, default=8000)
    given = parser.parse_args()
    if given.command == "serve":
        server = ThreadingHTTPServer(("127.0.0.1", given.port), handler(OpenVinoEngine(given)))
        print(f"http://127.0.0.1:{given.port}", flush=True)
        server.serve_forever()
        return
    target = convert(given.target, given.out / "target", [], int8=given.int8)
    if given.draft:
        draft = convert(given.draft, given.out / "draft", given.taps, int8=given.int8)
        if given.taps and not target.equal(draft):
            raise SystemExit(
                f"GenAI gives a draft its target's embedding, {given.draft} has another"
            )


if __name__ == "__main__":
    main()
